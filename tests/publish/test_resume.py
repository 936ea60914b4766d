"""Resuming: the baseline is rebuilt from the board and proven, or the run is not continued."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stitch.board import Board, open_board
from stitch.board.keys import TEMPORARY_FOLDER
from stitch.errors import (
    LineageError,
    RunNotFoundError,
    StoreError,
    StoreUnsuitableError,
    UsageError,
)
from stitch.mirror import Mirror
from stitch.publish import Publisher, write_anchor
from stitch.tensors import write_safetensors
from stitch.testing.faults import FaultyStore
from stitch.testing.published import (
    IMPATIENT,
    NO_RETRIES,
    PublishedRun,
    copy_of,
    digest_of,
    published_run,
    quick_board,
)
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights
from stitch.types import VersionRef


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 3)


def resume(world: PublishedRun, base: Path | None = None) -> Publisher:
    return Publisher.resume(world.board, "r", base, threads=1, retry=NO_RETRIES)


def publish_next(publisher: Publisher, world: PublishedRun) -> None:
    """One more version, proven by a reader that starts from the base."""
    weights = copy_of(world.weights[-1])
    adam_step(weights, 0.02, seed=77)
    version = publisher.ref.version + 1
    assert publisher.publish(weights).wait(60) == VersionRef("r", version)
    mirror = Mirror.load(world.weights[0])
    run = world.board.open_run("r")
    mirror.identify(run)
    mirror.advance(run)
    assert mirror.ref == VersionRef("r", version)
    assert digest_of(mirror.weights) == digest_of(weights)


def test_a_run_goes_on_from_its_newest_version(world: PublishedRun) -> None:
    with resume(world, world.base) as publisher:
        assert publisher.ref == VersionRef("r", 3)
        assert publisher.digest == world.digests[3]
        publish_next(publisher, world)
    current = world.board.current_epoch()
    assert current is not None
    assert (current.epoch, current.run) == (2, "r")


def test_the_base_is_found_where_the_run_record_says(world: PublishedRun) -> None:
    with resume(world) as publisher:
        publish_next(publisher, world)


def test_an_anchor_serves_where_the_base_is_gone(tmp_path: Path) -> None:
    world = published_run(tmp_path, 3, anchors=(2,))
    world.base.unlink()
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 3)
        publish_next(publisher, world)


def test_an_anchor_serves_where_another_base_is_given(tmp_path: Path) -> None:
    world = published_run(tmp_path, 2, anchors=(1,))
    other = tmp_path / "other.safetensors"
    write_safetensors(other, synthetic_weights(world.run.schema, seed=9))
    with resume(world, other) as publisher:
        assert publisher.digest == world.digests[2]


def test_a_damaged_anchor_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    world = published_run(tmp_path, 3, anchors=(1, 3))
    (shard,) = world.folder(3).glob("anchor-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    world.base.unlink()
    with resume(world) as publisher:
        assert publisher.digest == world.digests[3]


def test_without_base_and_anchor_the_run_is_not_continued(world: PublishedRun) -> None:
    world.base.unlink()
    with pytest.raises(LineageError) as caught:
        resume(world)
    message = str(caught.value)
    assert world.digests[0] in message
    assert "no usable anchor" in message
    current = world.board.current_epoch()
    assert current is not None
    assert current.epoch == 1  # a publisher that still runs is left alone


def test_weights_of_other_tensors_do_not_pass_for_the_base(
    tmp_path: Path, world: PublishedRun
) -> None:
    other = tmp_path / "other.safetensors"
    write_safetensors(other, synthetic_weights(synthetic_schema(hidden=16)))
    with pytest.raises(LineageError):
        resume(world, other)


def test_a_gap_in_the_versions_is_not_built_upon(world: PublishedRun) -> None:
    world.blob_path(2).unlink()
    with pytest.raises(LineageError, match="v/00000002"):
        resume(world)


def test_a_gap_is_bridged_by_an_anchor_behind_it(world: PublishedRun) -> None:
    world.blob_path(2).unlink()
    write_anchor(world.run, world.weights[3], 3)
    with resume(world) as publisher:
        assert publisher.digest == world.digests[3]
        weights = copy_of(world.weights[3])
        adam_step(weights, 0.02, seed=5)
        assert publisher.publish(weights).wait(60) == VersionRef("r", 4)


def test_a_store_that_fails_meanwhile_is_no_verdict_on_the_lineage(world: PublishedRun) -> None:
    store = FaultyStore(world.board.store)
    store.fail("v/00000002/", times=None)
    broken = replace(world, board=Board(store, patience=IMPATIENT))
    with pytest.raises(StoreError):
        resume(broken)
    store.heal()
    with resume(broken) as publisher:
        assert publisher.ref == VersionRef("r", 3)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="'r'"):
        Publisher.resume(quick_board(tmp_path / "board"), "r")


def test_opening_a_run_that_is_there_needs_no_base(world: PublishedRun) -> None:
    with Publisher.open(world.board, "r") as publisher:
        assert publisher.run.name == "r"
    with pytest.raises(UsageError, match="needs a base checkpoint, or a parent"):
        Publisher.open(world.board, "another")


def test_versions_published_while_resuming_are_taken_up(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = resume(world)
    real = Board.begin_epoch

    def late(board: Board, run: str, writer: str) -> object:
        monkeypatch.undo()
        publish_next(old, world)
        return real(board, run, writer)

    monkeypatch.setattr(Board, "begin_epoch", late)
    with resume(world) as publisher:
        assert publisher.ref == VersionRef("r", 5)  # 4 is taken up, 5 fences the old one off
        assert publisher.digest == world.board.open_run("r").digest(4)
    old.close()


def test_a_beginning_publisher_sweeps_what_killed_writers_left(tmp_path: Path) -> None:
    world = published_run(tmp_path, 1)
    root = tmp_path / "swept-board"
    folder = root / TEMPORARY_FOLDER
    folder.mkdir(parents=True)
    old, young = folder / "old", folder / "young"
    for path in (old, young):
        path.write_bytes(b"left by a killed writer")
    two_hours_ago_s = old.stat().st_mtime - 7200
    os.utime(old, (two_hours_ago_s, two_hours_ago_s))
    with Publisher.start(open_board(root), "r", world.base, threads=1):
        assert young.exists()
        assert not old.exists()
    os.utime(young, (two_hours_ago_s, two_hours_ago_s))
    with Publisher.resume(open_board(root), "r", threads=1):
        assert not young.exists()


def test_temporaries_of_somebody_else_keep_nobody_from_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = published_run(tmp_path, 1)

    def refuse(_: float) -> int:
        raise StoreUnsuitableError("cannot sweep .stitch-tmp: Operation not permitted")

    monkeypatch.setattr(world.board, "sweep_temporaries", lambda: refuse(0.0))
    with Publisher.resume(world.board, "r", world.base, threads=1) as publisher:
        assert publisher.ref.version == 1
