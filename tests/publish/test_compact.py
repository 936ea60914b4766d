"""The compactor: merged patches that are right, cheaper than their parts, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.board import Board, MergedStep, Route, Run, keys, plan_route, spans
from stitch.codec import diff_update
from stitch.errors import StoreError
from stitch.mirror import Mirror
from stitch.publish import write_anchor
from stitch.publish.compact import Compactor, cheapest_order
from stitch.records import MergedPatch
from stitch.testing.faults import FaultyStore
from stitch.testing.published import (
    IMPATIENT,
    PublishedRun,
    copy_of,
    digest_of,
    published_run,
)
from stitch.types import VersionRef

NEWEST = 17


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    """A run of 17 versions with all its merged patches."""
    world = published_run(tmp_path_factory.mktemp("run"), NEWEST)
    compact(world)
    return world


@pytest.fixture
def world(tmp_path: Path) -> PublishedRun:
    return published_run(tmp_path, 9)


def compact(world: PublishedRun, **options: object) -> list[MergedPatch]:
    compactor = Compactor(world.run, threads=1, **options)  # type: ignore[arg-type]
    try:
        done = compactor.compact()
        assert not compactor.skipped, compactor.skipped
        return done
    finally:
        compactor.close()


def mirror_at(world: PublishedRun, version: int) -> Mirror:
    mirror = Mirror.load(world.weights[version], threads=1)
    mirror.identify(world.run, range(len(world.weights) - 1, 0, -1))
    return mirror


def assert_advances(world: PublishedRun, run: Run, have: int, want: int) -> None:
    mirror = mirror_at(world, have)
    update = mirror.advance(run, want, threads=1)
    assert mirror.ref == VersionRef("r", want)
    assert digest_of(mirror.weights) == world.digests[want]
    other = copy_of(world.weights[have])
    update.apply(other)
    assert digest_of(other) == world.digests[want]


def test_all_spans_are_written_and_are_smaller_than_their_parts(finished: PublishedRun) -> None:
    run = finished.board.open_run("r")
    assert run.merged_spans() == sorted(spans.spans(NEWEST))
    for start, stop in run.merged_spans():
        merged = run.merged(start, stop)
        assert merged is not None
        update = diff_update(finished.weights[start], finished.weights[stop])
        assert merged.stats.num_changed == update.num_changed
        parts = sum(run.manifest(v).num_bytes for v in range(start + 1, stop + 1))
        assert merged.num_bytes < parts


@pytest.mark.parametrize(("have", "want"), [(0, 16), (0, 17), (3, 17), (8, 16), (5, 15), (15, 17)])
def test_a_mirror_goes_over_merged_patches_to_the_same_bits(
    finished: PublishedRun, have: int, want: int
) -> None:
    run = finished.board.open_run("r")
    route = plan_route(run, have, want)
    assert any(isinstance(step, MergedStep) for step in route.steps) == (want - have > 3)
    assert_advances(finished, run, have, want)


def test_nothing_is_left_to_do_the_second_time(world: PublishedRun) -> None:
    assert [(m.base_version, m.version) for m in compact(world)] == [(0, 4), (0, 8), (4, 8)]
    assert compact(world) == []


def test_it_goes_on_with_versions_that_appear(world: PublishedRun, tmp_path: Path) -> None:
    newest = [5]
    run = world.board.open_run("r")
    run.newest = lambda after=None: newest[0]  # type: ignore[method-assign]
    compactor = Compactor(run, threads=1)
    assert [m.version for m in compactor.compact()] == [4]
    assert compactor.compact() == []
    newest[0] = 9
    left: list[int] = []
    done = compactor.compact(lambda _: left.append(compactor.num_left))
    assert {(m.base_version, m.version) for m in done} == {(4, 8), (0, 8)}
    assert left == [1, 0]


def test_two_compactors_that_race_leave_one_patch_and_no_stray_blob(world: PublishedRun) -> None:
    other = world.board.open_run("r")

    class Racing(Compactor):
        def _merge(self, start: int, stop: int) -> MergedPatch:
            rival = Compactor(other, threads=1)
            rival._merge(start, stop)
            return super()._merge(start, stop)

    compactor = Racing(world.run, threads=1)
    done = compactor.compact()
    assert [m.version for m in done] == [4, 8, 8]
    named = {ref.name for merged in done for ref in merged.blobs}
    stored = {
        path.name for version in (4, 8) for path in world.folder(version).glob("from-*.patch")
    }
    assert stored == named
    assert_advances(world, world.board.open_run("r"), 0, 9)


@pytest.mark.parametrize("damage", ["altered", "missing", "record"])
def test_a_damaged_merged_patch_gives_way_to_its_parts(world: PublishedRun, damage: str) -> None:
    compact(world)
    if damage == "record":
        (world.folder(8) / "from-00000000.json").write_bytes(b"{")
    else:
        (blob,) = world.folder(8).glob("from-00000000-*.patch")
        blob.unlink() if damage == "missing" else blob.write_bytes(b"x" * blob.stat().st_size)
    run = world.board.open_run("r")
    store = FaultyStore(world.board.store)
    run = Board(store, patience=IMPATIENT).open_run("r")
    assert_advances(world, run, 0, 9)
    fetched = [key for operation, key in store.requests if "from-00000004-" in key]
    assert fetched, "the next longest spans are taken instead"


def test_when_all_merged_patches_are_bad_the_chain_is_left(world: PublishedRun) -> None:
    compact(world)
    for version in (4, 8):
        for path in world.folder(version).glob("from-*.patch"):
            path.write_bytes(path.read_bytes()[:-3])
    assert_advances(world, world.board.open_run("r"), 0, 9)


def test_without_the_base_an_anchor_is_the_start(world: PublishedRun, tmp_path: Path) -> None:
    write_anchor(world.run, world.weights[2], 2)
    scratch = tmp_path / "scratch"
    compactor = Compactor(world.run, base=tmp_path / "gone", scratch=scratch, threads=1)
    done = compactor.compact()
    assert [(m.base_version, m.version) for m in done] == [(4, 8)]
    assert set(compactor.skipped) == {(0, 4), (0, 8)}
    assert "no route from nothing to version 0" in compactor.skipped[0, 4]
    compactor.close()
    assert list(scratch.iterdir()) == []


def test_what_would_be_larger_is_not_written(
    world: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = plan_route(world.run, 0, 1).steps[0]
    monkeypatch.setattr("stitch.publish.compact.plan_route", lambda *_: Route((step,)))
    compactor = Compactor(world.run, threads=1)
    assert compactor.compact() == []
    assert set(compactor.skipped) == set(spans.spans(9))
    assert world.run.merged_spans() == []
    assert not list(world.folder(8).glob("from-*"))


def test_a_failing_store_ends_it_and_the_next_one_goes_on(world: PublishedRun) -> None:
    store = FaultyStore(world.board.store)
    run = Board(store, patience=IMPATIENT).open_run("r")
    store.fail("from-00000004", operations=("put",), times=None)
    with pytest.raises(StoreError):
        Compactor(run, threads=1).compact()
    assert world.run.merged_spans() == [(0, 4), (0, 8)]
    assert [(m.base_version, m.version) for m in compact(world)] == [(4, 8)]


def test_a_lost_reply_does_not_cost_a_patch_its_blobs(world: PublishedRun) -> None:
    store = FaultyStore(world.board.store)
    run = Board(store, patience=IMPATIENT).open_run("r")
    store.lose_reply("from-00000000.json", times=None)
    with pytest.raises(StoreError):
        Compactor(run, threads=1).compact()
    assert_advances(world, world.board.open_run("r"), 0, 4)


def test_it_stops_when_told_to(world: PublishedRun) -> None:
    asked = iter(range(10**6))
    compactor = Compactor(world.run, threads=1, stop=lambda: next(asked) > 8)
    assert len(compactor.compact()) < 3
    assert compactor.skipped == {}
    assert compactor.compact() == []
    assert compactor.num_left > 0
    compact(world)
    assert world.run.merged_spans() == sorted(spans.spans(9))


def test_changed_words_are_all_that_decoding_reads_if_so_asked(world: PublishedRun) -> None:
    for merged in compact(world, decode="changed"):
        assert set(merged.stats.encodings) <= {"gaps", "absent"}


def test_positions_that_flipped_back_vanish(tmp_path: Path) -> None:
    from stitch.publish import Publisher

    world = published_run(tmp_path, 1)
    with Publisher.resume(world.board, "r", threads=1) as publisher:
        for version in (0, 1, 0):
            publisher.publish(world.weights[version]).wait()
    (merged,) = compact(world)
    assert merged.stats.num_changed == 0
    assert set(merged.stats.encodings) == {"absent"}


def test_a_whole_run_goes_level_by_level_and_a_few_versions_by_their_ends() -> None:
    whole = cheapest_order(list(spans.spans(256)))
    assert whole[:2] == [(0, 4), (4, 8)]
    assert whole[-1] == (0, 256)
    last = cheapest_order([(60, 64), (56, 64), (48, 64), (32, 64), (0, 64)])
    assert last == [(0, 64), (32, 64), (48, 64), (56, 64), (60, 64)]


def test_keys_of_merged_blobs_are_told_from_those_of_versions(finished: PublishedRun) -> None:
    run = finished.board.open_run("r")
    merged = run.merged(0, 16)
    assert merged is not None
    assert all(ref.name.startswith("from-00000000-") for ref in merged.blobs)
    assert keys.merged_step(0, 16) == "v/00000016/from-00000000.json"
