"""The mirror moves from proven version to proven version, or says where it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stitch.board import Board
from stitch.codec import UpdateSet, diff_update
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    CorruptPatchError,
    NoRouteError,
    StoreError,
    UsageError,
)
from stitch.mirror import AdvanceError, Mirror
from stitch.mirror.fetch import fetch_parts
from stitch.publish import anchor as anchor_module
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.faults import FaultyStore
from stitch.testing.published import (
    IMPATIENT,
    PublishedRun,
    copy_of,
    digest_of,
    published_run,
    quick_board,
)
from stitch.testing.synthetic import synthetic_schema, synthetic_weights
from stitch.types import VersionRef


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 4)


def mirror_at(world: PublishedRun, version: int) -> Mirror:
    mirror = Mirror.load(world.weights[version])
    mirror.identify(world.run, range(4, 0, -1))
    assert mirror.ref == VersionRef("r", version)
    return mirror


def assert_is_version(mirror: Mirror, world: PublishedRun, version: int) -> None:
    assert mirror.ref == VersionRef("r", version)
    assert mirror.digest == world.digests[version]
    assert digest_of(mirror.weights) == world.digests[version]


def break_blob(world: PublishedRun, version: int) -> None:
    """Flip a bit of a stored patch, as a bad disk would."""
    path = world.blob_path(version)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def faulty(world: PublishedRun) -> tuple[FaultyStore, PublishedRun]:
    store = FaultyStore(world.board.store)
    board = Board(store, patience=IMPATIENT)
    return store, replace(world, board=board, run=board.open_run("r"))


def test_a_checkpoint_is_identified_as_the_base(world: PublishedRun) -> None:
    with open_checkpoint(world.base) as checkpoint:
        mirror = Mirror.load(checkpoint)
    assert mirror.ref is None
    assert mirror.identify(world.run) == VersionRef("r", 0)
    assert_is_version(mirror, world, 0)


def test_a_later_version_is_identified_only_when_asked_for(world: PublishedRun) -> None:
    mirror = Mirror.load(world.weights[2])
    with pytest.raises(BaseMismatchError):
        mirror.identify(world.run)
    assert mirror.ref is None
    assert mirror.identify(world.run, versions=(3, 2)) == VersionRef("r", 2)


def test_weights_of_another_base_are_refused_with_both_digests(world: PublishedRun) -> None:
    mirror = Mirror.load(synthetic_weights(world.run.schema, seed=99))
    with pytest.raises(BaseMismatchError) as caught:
        mirror.identify(world.run)
    message = str(caught.value)
    assert world.digests[0] in message
    assert mirror.digest in message
    assert "anchor" in message


def test_weights_of_other_tensors_are_refused_by_name(world: PublishedRun) -> None:
    mirror = Mirror.load(synthetic_weights(synthetic_schema(hidden=32, layers=1)))
    with pytest.raises(BaseMismatchError, match=r"missing model\.layers\.1\."):
        mirror.identify(world.run)


def test_a_step_applies_one_version_and_returns_its_changes(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    manifest = world.run.manifest(1)
    update = mirror.step(world.run, manifest)
    assert_is_version(mirror, world, 1)
    assert update.num_changed == manifest.stats.num_changed


def test_a_step_that_does_not_start_here_is_refused(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    with pytest.raises(BaseMismatchError, match=r"version 3 .* starts from r@2"):
        mirror.step(world.run, world.run.manifest(3))
    assert_is_version(mirror, world, 0)


def test_parts_of_another_version_leave_the_mirror_unchanged(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    parts = fetch_parts(world.run, world.run.manifest(2))
    with pytest.raises(BaseMismatchError):
        mirror.step(world.run, world.run.manifest(1), parts)
    assert_is_version(mirror, world, 0)


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_truncated_parts_leave_the_mirror_unchanged(world: PublishedRun, cut: int) -> None:
    mirror = mirror_at(world, 0)
    (part,) = fetch_parts(world.run, world.run.manifest(1))
    with pytest.raises(CorruptPatchError):
        mirror.step(world.run, world.run.manifest(1), [part[:cut]])
    assert_is_version(mirror, world, 0)


def test_an_interrupted_write_is_undone(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirror_at(world, 0)
    real = HostWeights.words_at
    calls = iter(range(1000))

    def interrupted(self: HostWeights, index: int) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(HostWeights, "words_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mirror.step(world.run, world.run.manifest(1))
    monkeypatch.undo()
    assert_is_version(mirror, world, 0)


def test_advance_reaches_the_newest_version_and_returns_one_update(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    update = mirror.advance(world.run)
    assert_is_version(mirror, world, 4)
    other = copy_of(world.weights[0])
    update.apply(other)
    assert digest_of(other) == world.digests[4]
    assert update.num_changed == diff_update(world.weights[0], world.weights[4]).num_changed


def test_advance_stops_at_the_target(world: PublishedRun) -> None:
    mirror = mirror_at(world, 1)
    mirror.advance(world.run, 3)
    assert_is_version(mirror, world, 3)


def test_advancing_to_where_one_is_changes_nothing(world: PublishedRun) -> None:
    mirror = mirror_at(world, 4)
    assert mirror.advance(world.run).num_changed == 0
    assert_is_version(mirror, world, 4)


def test_undo_leads_back_and_proves_it(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    before = mirror.digests
    update = mirror.advance(world.run)
    mirror.undo(update, VersionRef("r", 0), before)
    assert_is_version(mirror, world, 0)


def test_undoing_the_wrong_update_changes_nothing(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    before = mirror.digests
    first = mirror.advance(world.run, 1)
    mirror.advance(world.run, 2)
    with pytest.raises(BaseMismatchError, match="not the update set"):
        mirror.undo(first, VersionRef("r", 0), before)
    assert_is_version(mirror, world, 2)


def test_dense_changes_can_be_undone_too(tmp_path: Path) -> None:
    world = published_run(tmp_path, 2, density=0.6)
    assert "dense" in world.run.manifest(1).stats.encodings
    mirror = mirror_at(world, 0)
    before = mirror.digests
    update = mirror.advance(world.run)
    assert_is_version(mirror, world, 2)
    mirror.undo(update, VersionRef("r", 0), before)
    assert_is_version(mirror, world, 0)


def test_stop_is_asked_between_steps(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    answers = iter([False, False, False, True])
    update = mirror.advance(world.run, stop=lambda: next(answers, True))
    assert_is_version(mirror, world, 2)
    other = copy_of(world.weights[0])
    update.apply(other)
    assert digest_of(other) == world.digests[2]


def test_progress_counts_the_bytes_of_the_route(world: PublishedRun) -> None:
    seen: list[tuple[int, int]] = []
    mirror_at(world, 0).advance(world.run, progress=lambda done, total: seen.append((done, total)))
    total = sum(world.run.manifest(version).num_bytes for version in range(1, 5))
    assert len(seen) == 4
    assert seen[-1] == (total, total)


def test_a_blob_that_is_bad_once_is_fetched_again(world: PublishedRun) -> None:
    store, broken = faulty(world)
    fault = store.flip(".patch", offset=-3)
    mirror = mirror_at(world, 0)
    mirror.advance(broken.run)
    assert fault.num_hits == 1
    assert_is_version(mirror, world, 4)


def test_without_another_route_it_stops_before_a_bad_version(world: PublishedRun) -> None:
    break_blob(world, 3)
    mirror = mirror_at(world, 0)
    with pytest.raises(AdvanceError) as caught:
        mirror.advance(world.run)
    assert_is_version(mirror, world, 2)
    assert caught.value.ref == VersionRef("r", 2)
    assert "v/00000003" in str(caught.value)
    assert "stopped at version 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, NoRouteError)
    other = copy_of(world.weights[0])
    caught.value.partial.apply(other)
    assert digest_of(other) == world.digests[2]


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing", "no manifest"])
def test_a_bad_version_is_passed_by_an_anchor(tmp_path: Path, damage: str) -> None:
    world = published_run(tmp_path, 4, anchors=(4,))
    if damage == "altered":
        break_blob(world, 2)
    elif damage == "truncated":
        world.blob_path(2).write_bytes(world.blob_path(2).read_bytes()[:-5])
    elif damage == "missing":
        world.blob_path(2).unlink()
    else:
        world.manifest_path(2).write_bytes(b"{}")
    world.run = quick_board(tmp_path / "board").open_run("r")
    mirror = Mirror.load(world.weights[0])
    mirror.identify(world.run)
    update = mirror.advance(world.run, scratch=tmp_path / "scratch")
    assert_is_version(mirror, world, 4)
    other = copy_of(world.weights[0])
    update.apply(other)
    assert digest_of(other) == world.digests[4]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_bad_anchor_is_not_taken_for_a_version(tmp_path: Path) -> None:
    world = published_run(tmp_path, 3, anchors=(3,))
    break_blob(world, 2)
    (shard,) = world.folder(3).glob("anchor-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    mirror = mirror_at(world, 0)
    with pytest.raises(AdvanceError, match="anchor"):
        mirror.advance(world.run, scratch=tmp_path / "scratch")
    assert_is_version(mirror, world, 1)


def test_an_anchor_with_the_wrong_content_is_refused_by_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = published_run(tmp_path, 2)

    class Liar:
        @staticmethod
        def of(reader: object) -> object:
            return type("Digest", (), {"version_digest": lambda self: world.digests[2]})()

    monkeypatch.setattr(anchor_module, "DigestState", Liar)
    record = anchor_module.write_anchor(world.run, world.weights[1], 2)
    monkeypatch.undo()
    mirror = mirror_at(world, 0)
    with pytest.raises(CorruptBlobError, match=r"anchor 2 .* has digest"):
        mirror.jump(world.run, record)
    assert_is_version(mirror, world, 0)
    with pytest.raises(CorruptBlobError, match=r"anchor 2 .* has digest"):
        Mirror.from_anchor(world.run, record)


def test_a_mirror_starts_from_an_anchor_without_the_base(tmp_path: Path) -> None:
    world = published_run(tmp_path, 3, anchors=(2,))
    record = world.run.anchor(2)
    assert record is not None
    mirror = Mirror.from_anchor(world.run, record, scratch=tmp_path / "scratch")
    assert_is_version(mirror, world, 2)
    mirror.advance(world.run)
    assert_is_version(mirror, world, 3)


def test_a_store_that_does_not_answer_stops_it_at_a_proven_version(world: PublishedRun) -> None:
    store, broken = faulty(world)
    store.fail("v/00000003/", operations=("get", "get_range"), times=None)
    mirror = mirror_at(world, 0)
    for version in (1, 2):
        mirror.step(broken.run, broken.run.manifest(version))
    with pytest.raises(AdvanceError) as caught:
        mirror.advance(broken.run, 4)
    assert isinstance(caught.value.__cause__, StoreError)
    assert caught.value.partial.num_changed == 0
    assert_is_version(mirror, world, 2)


def test_an_interruption_leads_back_to_the_start(world: PublishedRun) -> None:
    mirror = mirror_at(world, 0)
    calls = iter(range(10))

    def interrupt() -> bool:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        mirror.advance(world.run, stop=interrupt)
    assert_is_version(mirror, world, 0)


def test_an_unidentified_mirror_does_not_advance(world: PublishedRun) -> None:
    with pytest.raises(UsageError, match="identify it first"):
        Mirror.load(world.weights[0]).advance(world.run)


def test_a_version_that_is_not_published_is_no_target(world: PublishedRun) -> None:
    mirror = mirror_at(world, 3)
    with pytest.raises(AdvanceError, match="9"):
        mirror.advance(world.run, 9)
    assert_is_version(mirror, world, 3)


def test_updates_are_folded_on_long_journeys(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch.mirror.advance._FOLD_BYTES", 0)
    composed: list[int] = []
    real = UpdateSet.compose

    def counting(sets: list[UpdateSet]) -> UpdateSet:
        composed.append(len(sets))
        return real(sets)

    monkeypatch.setattr(UpdateSet, "compose", staticmethod(counting))
    mirror = mirror_at(world, 0)
    update = mirror.advance(world.run)
    assert len(composed) > 1
    other = copy_of(world.weights[0])
    update.apply(other)
    assert digest_of(other) == world.digests[4]
