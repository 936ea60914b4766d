"""Retention: what is kept stays reachable, nobody is cut off, and a kill anywhere does no harm."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_kit import (
    NO_WAITS,
    SCHEMA,
    digest,
    heartbeat,
    new_run,
    publish,
    put_merged,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.board import AnchorStep, Board, ObjectInfo, PutMode, Run, keys, plan_route, spans
from stitch.board.keeping.collect import Collected, Collector
from stitch.board.keeping.retention import DAY_S, RetentionPolicy
from stitch.board.keeping.retired import Mark, Retention, is_deletable, ranges
from stitch.board.stores.store import ObjectStore, memory_store
from stitch.errors import (
    CorruptBlobError,
    CorruptRecordError,
    NoRouteError,
    StoreError,
    VersionRemovedError,
)
from stitch.records import AnchorRecord
from stitch.testing.faults import FaultyStore
from stitch.types import VersionRef


class ClockedStore(FaultyStore):
    """A store whose clock stands still until it is moved. Nothing else tells the time."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.now_unix_s = 1_000_000_000.0
        self.times: dict[str, float] = {}

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        written = super().put(key, source, mode=mode)
        if written:
            self.times[key] = self.now_unix_s
        return written

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return None if info is None else self._timed(info)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        return (self._timed(info) for info in super().list_objects(prefix))

    def _timed(self, info: ObjectInfo) -> ObjectInfo:
        return dataclasses.replace(info, modified_unix_s=self.times[info.key])


@pytest.fixture
def store() -> ClockedStore:
    return ClockedStore(memory_store(secrets.token_hex(8)))


@pytest.fixture
def run(store: ClockedStore) -> Run:
    """A run of 20 versions."""
    return run_of(store, 20)


def run_of(store: ObjectStore, newest: int) -> Run:
    run = new_run(Board(store, patience=NO_WAITS))
    for version in range(1, newest + 1):
        publish(run, version, b"x" * 20)
    return run


def reader_of(run: Run) -> Run:
    """Another process's look at the run."""
    return Board(run.board.store, patience=NO_WAITS).open_run(run.name)


def put_anchor(run: Run, version: int, num_bytes: int = 50) -> AnchorRecord:
    name = f"anchor-{secrets.token_hex(4)}-model.safetensors"
    ref = run.put_blob(version, name, b"w" * num_bytes)
    return run.commit_anchor(
        AnchorRecord(
            run=run.name, version=version, digest=digest(version), schema_digest=SCHEMA.digest,
            files=(ref,), num_bytes=num_bytes, created_unix_s=0.0, writer="w",
        )
    )  # fmt: skip


def gc(run: Run, grace_s: float = 0.0, **policy: object) -> Collected:
    chosen = RetentionPolicy(**policy)  # type: ignore[arg-type]
    return Collector(reader_of(run), chosen, grace_s=grace_s).collect()


def patches(run: Run) -> list[int]:
    """Versions whose own patch is on the board."""
    found = set()
    for info in run.board.store.list_objects(keys.versions_folder(run.name)):
        _, _, folder, name = info.key.split("/")
        if name.endswith(".patch") and not name.startswith("from-"):
            found.add(int(folder))
    return sorted(found)


def merged(run: Run) -> list[spans.Span]:
    return reader_of(run).merged_spans()


def travel(run: Run, have: int | None, want: int) -> None:
    """Fetch all that a route needs, as a reader would, leaving out what turns out missing."""
    reader = reader_of(run)
    avoid: set[str] = set()
    while True:
        route = plan_route(reader, have, want, avoid=frozenset(avoid))
        try:
            for step in route.steps:
                refs = step.record.files if isinstance(step, AnchorStep) else step.record.blobs
                for ref in refs:
                    key = step.key
                    reader.read_blob(step.to_version, ref)
            return
        except CorruptBlobError:
            avoid.add(key)


def test_it_only_says_what_would_go_unless_told_to(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 12)
    before = {info.key for info in store.list_objects("")}
    store.forget_requests()
    plan = Collector(reader_of(run), RetentionPolicy(keep_versions=5)).look()
    assert (plan.first, plan.newest) == (16, 20)
    assert {key.split("/")[1] for key in plan.garbage} == {f"{v:08d}" for v in range(1, 13)}
    assert store.counts["put"] == store.counts["delete"] == 0
    assert {info.key for info in store.list_objects("")} == before


def test_kept_versions_stay_reachable_from_an_anchor_and_older_ones_are_named(run: Run) -> None:
    put_anchor(run, 12)
    done = gc(run, keep_versions=5)
    assert (done.num_deleted, done.num_failed, done.num_waiting) == (12, 0, 0)
    assert patches(run) == list(range(13, 21))
    for version in range(12, 21):
        travel(run, None, version)
        travel(run, 0, version)
    for version in (1, 11):
        with pytest.raises(VersionRemovedError, match=f"version {version} of run 'math' was rem"):
            travel(run, 0, version)
    with pytest.raises(NoRouteError):
        plan_route(reader_of(run), 3, 21)
    assert reader_of(run).newest() == 20
    assert [m.version for m in reader_of(run).manifests(1, 21)] == list(range(1, 21))
    assert gc(run, keep_versions=5).num_deleted == 0


def test_without_an_anchor_the_way_from_the_base_stays(run: Run) -> None:
    assert gc(run, keep_versions=5).plan.garbage == {}
    assert patches(run) == list(range(1, 21))


def test_merged_patches_stand_for_the_single_ones_that_go(run: Run) -> None:
    for start, stop in spans.spans(20):
        put_merged(run, start, stop, 4)
    gc(run, keep_versions=3)
    assert patches(run) == [17, 18, 19, 20]
    assert merged(run) == [(0, 16), (16, 20)]
    for want in (18, 19, 20):
        travel(run, 0, want)
    with pytest.raises(VersionRemovedError):
        travel(run, 0, 7)
    travel(run, 0, 16)  # where a merged patch leads


def test_a_live_replica_is_not_cut_off_and_a_dead_one_is(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 18, SCHEMA.num_bytes)
    run.put_heartbeat(heartbeat("dead", applied=3))
    store.now_unix_s += 1000
    run.put_heartbeat(heartbeat("alive", applied=14))
    run.put_heartbeat(heartbeat("elsewhere", applied=2, run="other"))
    plan = gc(run, keep_versions=2).plan
    assert plan.live == (("alive", 14),)
    assert patches(run) == list(range(15, 21))
    travel(run, 14, 20)
    store.now_unix_s += 1000
    gc(run, keep_versions=2)
    assert patches(run) == [19, 20]
    travel(run, 14, 20)  # over the anchor


def test_named_versions_and_those_that_others_started_from_stay(
    run: Run, store: ClockedStore
) -> None:
    put_anchor(run, 2)
    put_anchor(run, 6)
    put_anchor(run, 15)
    new_run(run.board, "fork", parent=VersionRef("math", 8))
    done = gc(run, keep_versions=3, keep=frozenset({3, 19}), keep_anchors=1)
    assert done.plan.kept_besides == (3, 8)
    assert run.anchors() == [2, 6, 15]
    assert patches(run) == [1, 2, 3, 7, 8, 16, 17, 18, 19, 20]
    for version in (3, 8, 18, 19, 20):
        travel(run, None, version)
    with pytest.raises(VersionRemovedError):
        plan_route(reader_of(run), None, 1)


def test_old_anchors_go_if_so_wished(run: Run) -> None:
    for version in (4, 9, 14, 19):
        put_anchor(run, version)
    gc(run, keep_versions=4, keep_anchors=2)
    assert run.anchors() == [14, 19]
    gc(run, keep_versions=4, keep_anchors=0)
    # The oldest and the newest version that are kept are reached from there.
    assert run.anchors() == [14, 19]
    travel(run, None, 17)


def test_days_are_counted_by_the_stores_clock(store: ClockedStore) -> None:
    run = new_run(Board(store, patience=NO_WAITS))
    for version in range(1, 11):
        store.now_unix_s += DAY_S
        publish(run, version, b"x" * 40, created_unix_s=4e9 if version < 5 else 0.0)
    put_anchor(run, 4)
    plan = Collector(run, RetentionPolicy(keep_versions=1, keep_days=4.5)).look()
    assert plan.first == 6
    store.now_unix_s += 2 * DAY_S
    assert gc(run, keep_versions=1, keep_days=4.5).plan.first == 8
    assert gc(run, keep_versions=1, keep_days=100).plan.first == 8  # what is gone stays gone


def test_nothing_is_deleted_before_the_grace_time_is_over(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 12, SCHEMA.num_bytes)
    slow = plan_route(reader_of(run), 7, 20)
    assert slow.steps[0].to_version == 8
    first = gc(run, grace_s=60.0, keep_versions=5)
    assert (first.num_marked, first.num_waiting, first.num_deleted) == (12, 12, 0)
    for step in slow.steps:  # planned before, and still to be had
        for ref in step.record.blobs:  # type: ignore[union-attr]
            run.read_blob(step.to_version, ref)
    assert plan_route(reader_of(run), 7, 20).steps[0].to_version == 12
    travel(run, 0, 7)  # there is nothing better, so what is marked is used
    store.now_unix_s += 59
    again = gc(run, grace_s=60.0, keep_versions=5)
    assert (again.num_marked, again.num_waiting, again.num_deleted) == (0, 12, 0)
    store.now_unix_s += 2
    last = gc(run, grace_s=60.0, keep_versions=5)
    assert (last.num_marked, last.num_waiting, last.num_deleted) == (0, 0, 12)
    assert list(store.list_objects(keys.marks_folder("math"))) == []


def test_what_is_needed_again_is_spared(run: Run, store: ClockedStore) -> None:
    for start, stop in spans.spans(20):
        put_merged(run, start, stop, 4)
    gc(run, grace_s=60.0, keep_versions=3)
    run.put_heartbeat(heartbeat(applied=7))
    store.now_unix_s += 61
    gc(run, grace_s=60.0, keep_versions=3)
    assert patches(run) == [8, 17, 18, 19, 20]
    assert merged(run) == [(0, 16), (8, 16), (16, 20)]
    travel(run, 7, 20)


def test_what_was_written_after_the_mark_waits_anew(run: Run, store: ClockedStore) -> None:
    for start, stop in spans.spans(20):
        put_merged(run, start, stop, 4)
    gc(run, grace_s=60.0, keep_versions=3)
    store.now_unix_s += 30
    for info in list(store.list_objects("math/v/00000004")):
        if "from-" in info.key:
            store.delete(info.key)
    put_merged(run, 0, 4)
    store.now_unix_s += 31
    assert gc(run, grace_s=60.0, keep_versions=3).num_deleted > 0
    assert (0, 4) in merged(run)
    store.now_unix_s += 61
    gc(run, grace_s=60.0, keep_versions=3)


def test_blobs_of_writers_that_died_go_and_fresh_ones_stay(run: Run, store: ClockedStore) -> None:
    for version, name in [
        (20, "w1-0.patch"), (21, "w2-0.patch"), (8, "from-00000004-c-0.patch"),
        (19, "anchor-ab-model.safetensors"),
    ]:  # fmt: skip
        run.put_blob(version, name, b"stray")
    kept = put_merged(run, 16, 20)
    run.put_blob(20, "from-00000016-late-0.patch", b"loser")
    assert gc(run).num_deleted == 0
    store.now_unix_s += DAY_S + 1
    assert gc(run).num_deleted == 5
    assert patches(run) == list(range(1, 21))
    assert reader_of(run).read_blob(20, kept.blobs[0])
    travel(run, 0, 20)


def test_unknown_and_essential_objects_are_never_touched(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 12)
    for name in ("notes.txt", "torn.json", "other.bin"):
        store.put(f"math/v/00000003/{name}", b"keep me", mode="create")
    store.now_unix_s += 10 * DAY_S
    gc(run, keep_versions=2)
    left = {info.key.rsplit("/", 1)[-1] for info in store.list_objects("math/v/00000003")}
    assert left == {"manifest.json", "notes.txt", "torn.json", "other.bin"}
    for key in ("v/00000003/manifest.json", "run.json", "v/3/x.patch", "v/00000003/../x.patch",
                "v/00000003/torn.json", "head.json", "../other/v/00000003/x.patch"):  # fmt: skip
        assert not is_deletable(key)


def test_a_version_that_cannot_be_reached_stops_everything(run: Run, store: ClockedStore) -> None:
    for info in list(store.list_objects("math/v/00000009")):
        if info.key.endswith(".patch"):
            store.delete(info.key)
    with pytest.raises(NoRouteError, match="version 16 is to be kept, but no route leads to it"):
        gc(run, keep_versions=5)
    assert len(patches(run)) == 19
    put_anchor(run, 16)
    assert gc(run, keep_versions=5).num_deleted > 0


def test_a_damaged_record_shields_what_lies_beside_it(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 12)
    put_anchor(run, 19)
    for version in (18, 19):
        run.put_blob(version, "w9-0.patch", b"stray")
    store.put(keys.manifest("math", 18), b"{", mode="overwrite")
    store.now_unix_s += 2 * DAY_S
    gc(run, keep_versions=4)
    names = [info.key.rsplit("/", 1)[-1] for info in store.list_objects("math/v/00000018")]
    assert len(names) == 3
    assert len(list(store.list_objects("math/v/00000019"))) == 4
    assert patches(run) == list(range(13, 21))


def test_a_round_that_fails_at_the_clock_leaves_nothing(run: Run, store: ClockedStore) -> None:
    store.fail(keys.PROBE_FOLDER, operations=("head",))
    with pytest.raises(StoreError, match="planned fault"):
        gc(run, keep_versions=2)
    assert list(store.list_objects(keys.PROBE_FOLDER)) == []
    assert run.retention() is None


def test_deletions_that_fail_are_made_up_for(run: Run, store: ClockedStore) -> None:
    put_anchor(run, 12)
    store.fail("v/00000004/", operations=("delete",))
    store.lose_reply("v/00000006/")
    done = gc(run, keep_versions=5)
    assert (done.num_deleted, done.num_failed) == (10, 2)
    assert patches(run) == [4, *range(13, 21)]
    again = gc(run, keep_versions=5)
    assert (again.num_deleted, again.num_failed) == (1, 0)
    assert list(store.list_objects(keys.marks_folder("math"))) == []


@pytest.mark.parametrize("stop_after", range(0, 22, 3))
def test_stopped_after_any_deletion_the_next_one_ends_it(
    run: Run, store: ClockedStore, stop_after: int
) -> None:
    put_anchor(run, 12)
    for start, stop in spans.spans(20):
        put_merged(run, start, stop, 9)
    store.fail(operations=("delete",), after=stop_after + 1, times=None)  # one is the clock's
    gc(run, keep_versions=5)
    for want in range(16, 21):
        travel(run, 0, want)
        travel(run, None, want)
    for start, stop in merged(run):
        record = reader_of(run).merged(start, stop)
        assert record is not None
        reader_of(run).read_blob(stop, record.blobs[0])
    store.heal()
    gc(run, keep_versions=5)
    assert gc(run, keep_versions=5).plan.garbage == {}


def test_a_mark_cannot_name_what_must_stay(run: Run, store: ClockedStore) -> None:
    data = Mark(run="math", keys=("v/00000003/manifest.json",), created_unix_s=0, writer="x")
    with pytest.raises(CorruptRecordError):
        Mark.parse(data.to_json_bytes(), "k")
    store.put(keys.mark("math", "evil"), data.to_json_bytes(), mode="create")
    gc(run, keep_versions=5)
    assert reader_of(run).manifest(3).version == 3


def test_retention_records_are_hints_and_read_strictly(run: Run, store: ClockedStore) -> None:
    record = Retention(run="math", first=9, kept=((2, 4), (7, 7)), created_unix_s=0.5, writer="w")
    assert Retention.parse(record.to_json_bytes(), "k") == record
    has = [version for version in range(1, 12) if record.has_patch(version)]
    assert has == [2, 3, 4, 7, 10, 11]
    assert ranges({4, 2, 3, 7}) == ((2, 4), (7, 7))
    for kept in (((4, 2),), ((7, 7), (2, 4)), ((1, 9), (3, 4)), ((1, 3), (3, 4))):
        with pytest.raises(CorruptRecordError):
            Retention.parse(dataclasses.replace(record, kept=kept).to_json_bytes(), "k")
    for lie in (record.to_json_bytes(), b"\0" * 30, b"{}"):
        store.put(keys.retention("math"), lie, mode="overwrite")
        travel(run, 0, 20)
    store.fail("retention.json", operations=("get",), times=None, error=StoreError("no answer"))
    travel(run, 0, 20)


def test_one_step_does_not_ask_for_retention(run: Run, store: ClockedStore) -> None:
    reader = reader_of(run)
    store.forget_requests()
    plan_route(reader, 19, 20)
    assert store.requests == [("get", keys.manifest("math", 20))]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_after_any_policy_all_that_is_kept_can_still_be_reached(data: st.DataObject) -> None:
    store = ClockedStore(memory_store(secrets.token_hex(8)))
    newest = data.draw(st.integers(1, 24), label="newest")
    run = run_of(store, newest)
    for span in data.draw(st.sets(st.sampled_from(list(spans.spans(32)) or [(0, 4)]))):
        if span[1] <= newest:
            put_merged(run, *span, data.draw(st.integers(1, 6)))
    anchored = data.draw(st.sets(st.integers(0, newest), max_size=3), label="anchors")
    for version in anchored:
        put_anchor(run, version)
    replicas = data.draw(st.lists(st.integers(0, newest), max_size=2), label="replicas")
    for number, version in enumerate(replicas):
        run.put_heartbeat(heartbeat(f"r{number}", applied=version))
    keep = data.draw(st.sets(st.integers(1, newest), max_size=2), label="keep")
    count = data.draw(st.integers(1, newest + 1), label="keep_versions")
    for _ in range(data.draw(st.integers(1, 3), label="rounds")):
        done = gc(
            run,
            keep_versions=count,
            keep=frozenset(keep),
            keep_anchors=data.draw(st.none() | st.integers(0, 2), label="keep_anchors"),
        )
        assert done.num_waiting == done.num_failed == 0
    first = max(0, newest - count + 1)
    assert done.plan.first == first
    for want in {*range(first, newest + 1), *keep}:
        travel(run, 0, want)
        if any(version <= want for version in anchored) and plan_or_none(run, want):
            travel(run, None, want)
    for have in {*replicas, *range(first, newest + 1)}:
        travel(run, have, newest)
    assert reader_of(run).newest() == newest


def plan_or_none(run: Run, want: int) -> bool:
    try:
        plan_route(reader_of(run), None, want)
    except (NoRouteError, VersionRemovedError):
        return False
    return True
