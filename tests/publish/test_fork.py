"""Forks: version 0 of a run is a version of another one, proven by digest, without a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.board import Board
from stitch.errors import (
    LineageError,
    RunExistsError,
    RunNotFoundError,
    UsageError,
    VersionNotFoundError,
)
from stitch.mirror import Mirror, from_anchor_on_line, lead, line_of, recognise
from stitch.publish import Publisher, write_anchor
from stitch.publish.compact import Compactor
from stitch.tensors import HostWeights
from stitch.testing.faults import FaultyStore
from stitch.testing.published import (
    NO_RETRIES,
    PublishedRun,
    copy_of,
    digest_of,
    published_run,
)
from stitch.testing.synthetic import adam_step
from stitch.types import VersionRef


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 3)


def fork(world: PublishedRun, parent: str, run: str = "f", **options: object) -> Publisher:
    return Publisher.start(world.board, run, parent=parent, threads=1, retry=NO_RETRIES, **options)


def changed(weights: HostWeights, seed: int) -> HostWeights:
    new = copy_of(weights)
    adam_step(new, 0.02, seed=seed)
    return new


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_fork_begins_with_exactly_the_weights_of_its_parent(
    world: PublishedRun, version: int
) -> None:
    with fork(world, f"r@{version}") as publisher:
        assert publisher.ref == VersionRef("f", 0)
        assert publisher.digest == world.digests[version]
        weights = changed(world.weights[version], 50)
        assert publisher.publish(weights).wait(60) == VersionRef("f", 1)
    run = world.board.open_run("f")
    record = run.record
    assert record.parent == VersionRef("r", version)
    assert (record.base_digest, record.view) == (world.digests[version], "bf16")
    assert run.digest(1) == digest_of(weights)
    folder = world.folder(0).parents[2] / "f"
    assert list(folder.rglob("*.patch"))
    assert not list(folder.rglob("*.safetensors"))  # no weights were copied
    epoch = world.board.current_epoch()
    assert epoch is not None
    assert epoch.run == "f"
    assert world.run.newest() == 3


def test_readers_reach_a_fork_from_its_ancestors_base(world: PublishedRun) -> None:
    with fork(world, "r@2", "f") as publisher:
        publisher.publish(weights := changed(world.weights[2], 50)).wait(60)
    with fork(world, "f@1", "g") as publisher:
        last = changed(weights, 51)
        publisher.publish(last).wait(60)
    run = world.board.open_run("g")
    assert [(part.run.name, part.end) for part in line_of(run)] == [("g", None), ("f", 1), ("r", 2)]
    mirror = Mirror.load(world.weights[0])
    assert recognise(mirror, run) == VersionRef("r", 0)
    update = lead(mirror, run)
    assert mirror.ref == VersionRef("g", 1)
    assert digest_of(mirror.weights) == digest_of(last)
    update.undo(mirror.weights)
    assert digest_of(mirror.weights) == world.digests[0]


@pytest.mark.parametrize("anchored", ["f", "r"])
def test_a_fork_is_resumed_by_an_anchor_of_its_own_or_of_its_parents(
    world: PublishedRun, anchored: str
) -> None:
    with fork(world, "r@2") as publisher:
        publisher.publish(weights := changed(world.weights[2], 50)).wait(60)
    if anchored == "f":
        write_anchor(world.board.open_run("f"), world.weights[2], 0)
    else:
        write_anchor(world.run, world.weights[1], 1)
        write_anchor(world.run, world.weights[3], 3)  # beyond the fork: leads nowhere
    world.base.unlink()
    with Publisher.resume(world.board, "f", threads=1, retry=NO_RETRIES) as publisher:
        assert publisher.ref == VersionRef("f", 1)
        assert publisher.digest == digest_of(weights)
        publisher.publish(changed(weights, 51)).wait(60)


def test_a_fork_is_resumed_from_the_base_that_its_ancestor_started_from(
    world: PublishedRun,
) -> None:
    fork(world, "r@3").close()
    with Publisher.resume(world.board, "f", threads=1, retry=NO_RETRIES) as publisher:
        assert publisher.ref == VersionRef("f", 0)
        assert publisher.digest == world.digests[3]


def test_an_anchor_beyond_the_fork_is_not_taken_for_its_way(world: PublishedRun) -> None:
    fork(world, "r@2").close()
    write_anchor(world.run, world.weights[3], 3)
    world.base.unlink()
    with pytest.raises(LineageError):
        Publisher.resume(world.board, "f", threads=1, retry=NO_RETRIES)


def test_a_fork_outlives_its_parent_if_it_has_an_anchor(world: PublishedRun) -> None:
    fork(world, "r@2").close()
    run = world.board.open_run("f")
    write_anchor(run, world.weights[2], 0)
    (world.folder(1).parents[1] / "run.json").unlink()
    world.base.unlink()
    assert len(line_of(run)) == 1
    assert from_anchor_on_line(run).ref == VersionRef("f", 0)
    with Publisher.resume(world.board, "f", threads=1, retry=NO_RETRIES) as publisher:
        assert publisher.digest == world.digests[2]


def test_a_parent_that_was_another_is_not_followed(world: PublishedRun) -> None:
    """The parent run was removed and another one took its name."""
    fork(world, "r@2").close()
    for version in (2, 3):
        world.manifest_path(version).unlink()
    with Publisher.resume(world.board, "r", world.base, threads=1) as publisher:
        publisher.publish(changed(world.weights[1], 99)).wait(60)
    fresh = type(world.board)(world.board.store, patience=world.board.patience)
    assert len(line_of(fresh.open_run("f"))) == 1


def test_small_files_come_along(tmp_path: Path) -> None:
    from stitch.tensors import write_checkpoint

    world = published_run(tmp_path, 1)
    base = tmp_path / "model"
    base.mkdir()
    write_checkpoint(base, world.weights[0])
    (base / "config.json").write_text('{"a": 1}')
    with Publisher.start(world.board, "p", base, threads=1) as publisher:
        publisher.publish(world.weights[1]).wait(60)
    fork(world, "p@1").close()
    run = world.board.open_run("f")
    (asset,) = run.record.assets
    assert run.read_asset(asset) == b'{"a": 1}'


@pytest.mark.parametrize(
    ("parent", "error"),
    [
        ("r@4", VersionNotFoundError),
        ("x@1", RunNotFoundError),
        ("r", UsageError),
        ("r@01", UsageError),
        ("r@-1", UsageError),
        ("../r@1", UsageError),
    ],
)
def test_a_parent_that_is_not_there_is_named(
    world: PublishedRun, parent: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        fork(world, parent)
    assert world.board.runs() == ["r"]


def test_a_version_that_cannot_be_reproduced_is_not_forked(world: PublishedRun) -> None:
    world.blob_path(2).unlink()
    with pytest.raises(LineageError, match="version 3"):
        fork(world, "r@3")
    assert world.board.runs() == ["r"]
    fork(world, "r@1").close()


def test_a_name_that_is_taken_or_another_view_is_refused(world: PublishedRun) -> None:
    with pytest.raises(RunExistsError):
        fork(world, "r@1", "r")
    with pytest.raises(UsageError, match="publishes view 'bf16', not 'checkpoint'"):
        fork(world, "r@1", view="checkpoint")
    with pytest.raises(UsageError, match="needs a base checkpoint, or a parent"):
        Publisher.start(world.board, "f")


def test_opening_a_fork_starts_it_and_then_resumes_it(world: PublishedRun) -> None:
    for expected in (0, 1):
        with Publisher.open(world.board, "f", parent="r@2", threads=1) as publisher:
            assert publisher.ref == VersionRef("f", expected)
            publisher.publish(changed(world.weights[2], expected)).wait(60)
    with pytest.raises(UsageError, match="was forked from r@2, not from r@1"):
        Publisher.open(world.board, "f", parent="r@1")
    with pytest.raises(UsageError, match="was not forked, not from f@0"):
        Publisher.open(world.board, "r", parent="f@0")


def test_a_fork_is_compacted_without_weights_of_its_own(world: PublishedRun) -> None:
    weights = world.weights[2]
    with fork(world, "r@2", anchor_every=None) as publisher:
        for seed in range(4):
            weights = changed(weights, seed)
            publisher.publish(weights).wait(60)
    store = FaultyStore(world.board.store)
    run = Board(store, patience=world.board.patience).open_run("f")
    store.forget_requests()
    compactor = Compactor(run, threads=1)
    assert store.num_requests == 0  # nothing can fail before it begins
    try:
        assert [(m.base_version, m.version) for m in compactor.compact()] == [(0, 4)]
        assert not compactor.skipped
    finally:
        compactor.close()
