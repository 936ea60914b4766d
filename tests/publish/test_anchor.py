"""Anchors hold a whole version, and nothing depends on their being written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stitch.board import Board
from stitch.errors import BaseMismatchError, StoreFullError, VersionNotFoundError
from stitch.mirror import Mirror
from stitch.publish import Publisher, write_anchor
from stitch.tensors import open_checkpoint, write_safetensors
from stitch.testing.faults import FaultyStore
from stitch.testing.published import (
    IMPATIENT,
    NO_RETRIES,
    PublishedRun,
    digest_of,
    published_run,
    quick_board,
)
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 2)


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
def test_an_anchor_alone_gives_the_whole_version(
    world: PublishedRun, tmp_path: Path, max_shard_bytes: int
) -> None:
    seen: list[tuple[int, int]] = []
    record = write_anchor(
        world.run,
        world.weights[2],
        2,
        scratch=tmp_path / "scratch",
        max_shard_bytes=max_shard_bytes,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert record.digest == world.digests[2]
    assert world.run.anchors() == [2]
    assert seen[-1] == (world.run.schema.num_bytes, world.run.schema.num_bytes)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (len(record.files) > 2) == (max_shard_bytes == 20_000)
    directory = world.run.fetch_anchor(record, tmp_path / "fetched")
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.schema == world.run.schema
        assert digest_of(Mirror.load(checkpoint).weights) == world.digests[2]


def test_the_base_can_be_anchored_too(world: PublishedRun) -> None:
    record = write_anchor(world.run, world.weights[0], 0)
    assert record.digest == world.run.record.base_digest


def test_an_anchor_of_other_weights_is_refused(world: PublishedRun) -> None:
    with pytest.raises(BaseMismatchError, match="cannot anchor version 2"):
        write_anchor(world.run, world.weights[1], 2)
    assert world.run.anchors() == []


def test_an_anchor_of_no_version_is_refused(world: PublishedRun) -> None:
    with pytest.raises(VersionNotFoundError):
        write_anchor(world.run, world.weights[2], 7)


def test_an_anchor_is_written_once(world: PublishedRun) -> None:
    first = write_anchor(world.run, world.weights[1], 1)
    assert write_anchor(world.run, world.weights[1], 1) == first
    assert len(list(world.folder(1).glob("anchor-*"))) == len(first.files)


def publish_versions(board: Board, directory: Path, count: int, **options: object) -> None:
    weights = synthetic_weights(synthetic_schema(hidden=16))
    base = directory / "base.safetensors"
    write_safetensors(base, weights)
    with Publisher.start(
        board, "r", base, retry=NO_RETRIES, threads=1, scratch=directory / "scratch", **options
    ) as publisher:
        for step in range(count):
            adam_step(weights, 0.02, seed=step)
            publisher.publish(weights).wait(60)
            publisher.flush(60)


def test_every_nth_version_is_anchored_while_publishing(tmp_path: Path) -> None:
    board = quick_board(tmp_path / "board")
    publish_versions(board, tmp_path, 5, anchor_every=2)
    run = board.open_run("r")
    assert run.anchors() == [2, 4]
    for version in (2, 4):
        record = run.anchor(version)
        assert record is not None
        assert Mirror.from_anchor(run, record).digest == run.digest(version)


def test_a_failed_anchor_fails_no_version_and_is_made_up_for_at_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(quick_board(tmp_path / "board").store)
    store.fail("anchor-", error=StoreFullError("the store is full (planned fault)"))
    board = Board(store, patience=IMPATIENT)
    with caplog.at_level(logging.WARNING, "stitch"):
        publish_versions(board, tmp_path, 4, anchor_every=2)
    run = board.open_run("r")
    assert run.newest() == 4
    assert run.anchors() == [3, 4]
    assert sum("event=anchor_failed" in r.getMessage() for r in caplog.records) == 1
