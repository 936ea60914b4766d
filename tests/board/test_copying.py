"""Copying a board: the same records and blobs, in an order that every reader can bear."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import copy_child
import pytest
from board_kit import (
    NO_WAITS,
    SCHEMA,
    digest,
    heartbeat,
    manifest,
    new_run,
    publish,
    publish_through,
    put_merged,
    run_record,
)

from stitch.board import Board, Run, keys, open_board
from stitch.board.copying import BoardCopier, Copied, follow
from stitch.board.copying.objects import IN_MEMORY_BYTES
from stitch.board.copying.removed import joined
from stitch.board.keeping.collect import Collector
from stitch.board.keeping.retention import RetentionPolicy
from stitch.board.keeping.retired import Retention
from stitch.board.stores.store import ObjectStore, memory_store
from stitch.errors import (
    CopyConflictError,
    CorruptBlobError,
    CorruptRecordError,
    RunNotFoundError,
    StoreError,
    StoreFullError,
    UsageError,
)
from stitch.testing.faults import FaultyStore

NOT_COPIED = ("head", "heartbeat", "anchors", "mark", "retention", "other")


@pytest.fixture
def source(memory_board: Board) -> Board:
    return memory_board


@pytest.fixture
def run(source: Board) -> Run:
    ref = source.put_asset("math", "config.json", b"{}")
    return source.create_run(run_record(assets=(ref,)), SCHEMA)


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    """Of the target."""
    return FaultyStore(memory_store(f"{tmp_path}-target"))


@pytest.fixture
def target(store: FaultyStore) -> Board:
    return Board(store, patience=NO_WAITS)


def copier(source: Board, target: Board, tmp_path: Path, run: str | None = None) -> BoardCopier:
    return BoardCopier(source, target, run=run, scratch=tmp_path / "scratch")


def content(store: ObjectStore) -> dict[str, bytes]:
    """All that a copy is to bring over, by key."""
    found = {}
    for info in store.list_objects(""):
        if keys.kind_of(info.key) not in NOT_COPIED and ".stitch" not in info.key:
            data = store.get(info.key, max_bytes=2**40)
            assert data is not None
            found[info.key] = data
    return found


def write_anchor(run: Run, version: int, folder: Path, data: bytes = b"whole") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    run.write_anchor(version, folder, writer="w")


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_everything_arrives_byte_for_byte(
    source: Board, run: Run, target: Board, tmp_path: Path, kind: str
) -> None:
    if kind == "directory":
        target = open_board(tmp_path / "target", patience=NO_WAITS)
    publish_through(run, 9)
    put_merged(run, 0, 8)
    put_merged(run, 4, 8)
    write_anchor(run, 9, tmp_path / "anchor")
    source.begin_epoch("math", "trainer-0")
    source.begin_epoch("math", "trainer-1")
    run.put_heartbeat(heartbeat())
    done = copier(source, target, tmp_path).copy()
    assert content(target.store) == content(source.store)
    assert done == Copied(
        runs=1, versions=9, merged=2, anchors=1, epochs=2, newest={"math": 9},
        num_bytes=sum(
            len(data) for key, data in content(source.store).items()
            if keys.kind_of(key) == "blob"
        ),
    )  # fmt: skip
    copied = target.open_run("math")
    assert copied.newest() == 9
    assert copied.heartbeats() == []
    assert copied.hinted_anchors() == [9]
    assert target.current_epoch() == source.current_epoch()
    assert copied.fetch_anchor(copied.anchor(9), tmp_path / "out")  # type: ignore[arg-type]


def test_a_second_copy_finds_nothing_to_do(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    publish_through(run, 5)
    put_merged(run, 0, 4)
    source.begin_epoch("math", "w")
    copier(source, target, tmp_path).copy()
    before = content(store)
    store.forget_requests()
    again = copier(source, target, tmp_path).copy()
    assert not again.is_news
    assert again.num_bytes == 0
    assert content(store) == before
    blobs = [key for op, key in store.requests if op == "put" and key.endswith(".patch")]
    assert blobs == []


def test_later_rounds_bring_what_came_since(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 3)
    copying = copier(source, target, tmp_path)
    copying.copy()
    publish_through(run, 8)
    put_merged(run, 0, 8)
    fork = new_run(source, "fork")
    publish(fork, 1)
    source.begin_epoch("fork", "w")
    done = copying.copy()
    assert (done.runs, done.versions, done.merged, done.epochs) == (1, 6, 1, 1)
    assert content(target.store) == content(source.store)


def test_one_run_can_be_copied_alone(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish(run, 1)
    publish(new_run(source, "other"), 1)
    copier(source, target, tmp_path, "other").copy()
    assert target.runs() == ["other"]
    with pytest.raises(RunNotFoundError, match="oter"):
        copier(source, target, tmp_path, "oter").copy()


def test_manifests_come_after_their_blobs_and_in_order(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    publish_through(run, 12)
    store.forget_requests()
    copier(source, target, tmp_path).copy()
    puts = [key for operation, key in store.requests if operation == "put"]
    manifests = [key for key in puts if key.endswith("manifest.json")]
    assert manifests == [keys.manifest("math", version) for version in range(1, 13)]
    for version in range(1, 13):
        (ref,) = run.manifest(version).blobs
        assert puts.index(keys.blob("math", version, ref.name)) < puts.index(
            keys.manifest("math", version)
        )
    assert puts.index(keys.run_record("math")) < puts.index(manifests[0])


def test_epochs_come_last(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    source.begin_epoch("math", "w")
    publish(run, 1)
    store.fail("v/00000001/manifest.json", operations=("put",), times=None)
    with pytest.raises(StoreError):
        copier(source, target, tmp_path).copy()
    assert target.current_epoch() is None
    store.heal()
    copier(source, target, tmp_path).copy()
    assert target.current_epoch() == source.current_epoch()


# --- conflicts -------------------------------------------------------------------------------


def test_a_different_manifest_is_a_conflict_and_stays(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 2)
    copying = copier(source, target, tmp_path)
    copying.copy()
    theirs = publish(target.open_run("math"), 3)
    publish_through(run, 4)
    for attempt in (copying, copier(source, target, tmp_path)):
        with pytest.raises(CopyConflictError, match=r"v/00000003/manifest\.json"):
            attempt.copy()
    found = open_again(target).open_run("math")
    assert found.manifest(3) == theirs
    assert found.newest() == 3


def test_a_version_that_only_the_target_has_is_a_conflict(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish(run, 1)
    copier(source, target, tmp_path).copy()
    publish(target.open_run("math"), 2)
    with pytest.raises(CopyConflictError, match="version 2 on"):
        copier(source, target, tmp_path).copy()


def test_another_run_of_the_same_name_is_a_conflict(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    new_run(target, "math", writer="somebody else")
    with pytest.raises(CopyConflictError, match=r"math/run\.json"):
        copier(source, target, tmp_path).copy()


@pytest.mark.parametrize("num_theirs", [1, 3])
def test_an_epoch_that_began_on_the_target_is_a_conflict(
    source: Board, run: Run, target: Board, tmp_path: Path, num_theirs: int
) -> None:
    source.begin_epoch("math", "w")
    source.begin_epoch("math", "w")
    for _ in range(num_theirs):
        target.begin_epoch("math", "another")
    with pytest.raises(CopyConflictError, match="epoch"):
        copier(source, target, tmp_path).copy()


def test_a_merged_patch_or_anchor_of_the_targets_own_stays(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 4)
    copier(source, target, tmp_path).copy()
    write_anchor(target.open_run("math"), 4, tmp_path / "theirs", b"theirs")
    own = put_merged(target.open_run("math"), 0, 4)
    write_anchor(run, 4, tmp_path / "ours", b"ours")
    put_merged(run, 0, 4)
    done = copier(source, target, tmp_path).copy()
    assert (done.merged, done.anchors) == (0, 0)
    assert open_again(target).open_run("math").merged(0, 4) == own


def test_a_board_is_not_copied_to_itself(source: Board) -> None:
    with pytest.raises(UsageError, match="to itself"):
        BoardCopier(source, source)


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("match", [".patch", "manifest.json", "anchor", "run.json", "schema"])
def test_lost_replies_do_no_harm(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path, match: str
) -> None:
    publish_through(run, 6)
    write_anchor(run, 6, tmp_path / "anchor")
    store.lose_reply(match, times=2)
    copier(source, target, tmp_path).copy()
    assert content(store) == content(source.store)


@pytest.mark.parametrize("num_before", [0, 3, 7, 11, 15])
def test_a_copy_that_fails_anywhere_is_gone_on_with(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path, num_before: int
) -> None:
    publish_through(run, 5)
    put_merged(run, 0, 4)
    write_anchor(run, 5, tmp_path / "anchor")
    source.begin_epoch("math", "w")
    target.check_store()
    fault = store.fill_up(after=num_before, times=None)
    with pytest.raises(StoreFullError):
        copier(source, target, tmp_path).copy()
    assert fault.num_hits > 0
    assert_whole(target)
    store.heal()
    copier(source, target, tmp_path).copy()
    assert content(store) == content(source.store)


def assert_whole(board: Board) -> None:
    """Whatever is published has all its blobs."""
    board = open_again(board)
    for name in board.runs():
        copied = board.open_run(name)
        for version in range(1, copied.newest() + 1):
            for ref in copied.manifest(version).blobs:
                copied.read_blob(version, ref)


def open_again(board: Board) -> Board:
    return Board(board.store, patience=NO_WAITS)


def test_a_damaged_blob_is_not_passed_on(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 3)
    (ref,) = run.manifest(2).blobs
    source.store.put(keys.blob("math", 2, ref.name), b"patch X", mode="overwrite")
    with pytest.raises(CorruptBlobError, match="v/00000002"):
        copier(source, target, tmp_path).copy()
    assert open_again(target).open_run("math").newest() == 1


def test_what_a_broken_upload_left_at_a_blobs_key_is_replaced(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    (ref,) = publish(run, 1).blobs
    store.put(keys.blob("math", 1, ref.name), b"garbage", mode="create")
    copier(source, target, tmp_path).copy()
    assert content(store) == content(source.store)


def test_a_damaged_merged_patch_does_not_hold_up_the_others(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 8)
    bad = put_merged(run, 0, 4)
    put_merged(run, 4, 8)
    source.store.put(keys.blob("math", 4, bad.blobs[0].name), b"wrong", mode="overwrite")
    source.store.put(keys.merged("math", 0, 8), b"{}", mode="create")
    done = copier(source, target, tmp_path).copy()
    assert done.merged == 1
    assert set(done.left_out) == {keys.merged("math", 0, 4), keys.merged("math", 0, 8)}
    assert target.open_run("math").merged_spans() == [(4, 8)]


def test_manifests_that_do_not_follow_each_other_are_refused(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 2)
    wrong = manifest(run, 3, run.manifest(2).blobs, digest_before=digest(17))
    source.store.put(keys.manifest("math", 3), wrong.to_json_bytes(), mode="create")
    (ref,) = wrong.blobs
    source.store.put(keys.blob("math", 3, ref.name), b"patch 2", mode="create")
    with pytest.raises(CorruptRecordError, match="digest_before"):
        copier(source, target, tmp_path).copy()
    assert open_again(target).open_run("math").newest() == 2


def test_large_blobs_go_through_the_disk_and_are_gone_on_with(
    source: Board, run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    data = secrets.token_bytes(IN_MEMORY_BYTES + 5_000_000)
    publish(run, 1, data)
    faulty = FaultyStore(source.store)
    faulty.fail(".patch", operations=("get_range",), after=3, times=None)
    with pytest.raises(StoreError):
        copier(Board(faulty, patience=NO_WAITS), target, tmp_path).copy()
    faulty.heal()
    faulty.forget_requests()
    seen: list[tuple[int, int]] = []
    BoardCopier(
        Board(faulty, patience=NO_WAITS),
        target,
        scratch=tmp_path / "scratch",
        progress=lambda done, wanted: seen.append((done, wanted)),
    ).copy()
    assert content(store) == content(source.store)
    assert faulty.counts["get_range"] <= 4  # of six pieces
    assert seen[-1] == (len(data), len(data))
    assert not (tmp_path / "scratch" / "stitch-staging").exists()


def test_what_retention_removed_is_left_out_and_readers_are_told(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 12)
    put_merged(run, 0, 8)
    write_anchor(run, 10, tmp_path / "anchor")
    collector = Collector(run, RetentionPolicy(keep_versions=3), grace_s=0.0)
    assert collector.collect().num_deleted > 0
    copier(source, target, tmp_path).copy()
    assert content(target.store) == {key: data for key, data in content(source.store).items()}
    copied, retention = target.open_run("math"), target.open_run("math").retention()
    assert copied.newest() == 12
    assert retention is not None
    assert not retention.has_patch(5)
    assert retention.has_patch(12)


def test_what_the_targets_retention_removed_does_not_come_back(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 12)
    put_merged(run, 0, 4)
    write_anchor(run, 4, tmp_path / "four")
    write_anchor(run, 10, tmp_path / "ten")
    copying = copier(source, target, tmp_path)
    copying.copy()
    policy = RetentionPolicy(keep_versions=3, keep_anchors=1)
    for _ in range(2):
        Collector(open_again(target).open_run("math"), policy, grace_s=0.0).collect()
    left = content(target.store)
    assert keys.anchor("math", 4) not in left
    publish(run, 13)
    for each in (copying, copier(source, target, tmp_path)):
        each.copy()
    assert set(content(target.store)) - set(left) == {
        key for key in content(source.store) if "v/00000013" in key
    }


def test_two_retentions_leave_what_neither_removed() -> None:
    def retention(first: int, *kept: tuple[int, int]) -> Retention:
        return Retention(run="r", first=first, kept=kept, created_unix_s=1.0, writer="w")

    ours, theirs = retention(10, (2, 4), (7, 7)), retention(20, (3, 8), (12, 13))
    both = joined(ours, theirs)
    for version in range(1, 30):
        assert both.has_patch(version) == (ours.has_patch(version) and theirs.has_patch(version))
    assert joined(both, theirs) is both
    assert Retention.parse(both.to_json_bytes(), "k") == both


# --- together, and for long ------------------------------------------------------------------


def test_copiers_that_race_do_no_harm(
    source: Board, run: Run, target: Board, tmp_path: Path
) -> None:
    publish_through(run, 30)
    put_merged(run, 0, 16)
    write_anchor(run, 30, tmp_path / "anchor")
    source.begin_epoch("math", "w")
    start = threading.Barrier(4)

    def race(number: int) -> Copied:
        start.wait(30)
        return copier(source, open_again(target), tmp_path / str(number)).copy()

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(race, range(4)))
    assert content(target.store) == content(source.store)
    assert max(each.versions for each in done) > 0


@pytest.mark.parametrize(
    "failpoint",
    ["copy.blob.done:1", "copy.record:3", "copy.version.done:2", "board.manifest.temp:3",
     "board.manifest.created:2", "board.blob.temp:4", "copy.blob.done:7", "board.anchor.temp",
     "board.epoch.temp"],
)  # fmt: skip
def test_a_killed_copy_leaves_whole_versions_and_the_next_one_goes_on(
    tmp_path: Path, failpoint: str
) -> None:
    source = open_board(tmp_path / "source", patience=NO_WAITS)
    run = new_run(source)
    publish_through(run, 5)
    put_merged(run, 0, 4)
    write_anchor(run, 5, tmp_path / "anchor")
    source.begin_epoch("math", "w")
    killed = subprocess.run(
        [sys.executable, copy_child.__file__, *map(str, (tmp_path / "source", tmp_path / "t"))],
        env=os.environ | {"STITCH_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    target = open_board(tmp_path / "t", patience=NO_WAITS)
    assert_whole(target)
    copier(source, target, tmp_path).copy()
    assert content(target.store) == content(source.store)


def test_an_idle_look_costs_one_request(run: Run, target: Board, tmp_path: Path) -> None:
    publish_through(run, 7)
    run.board.begin_epoch("math", "w")
    faulty = FaultyStore(run.board.store)
    copying = copier(Board(faulty, patience=NO_WAITS), target, tmp_path)
    copying.copy()
    for _ in range(12):
        faulty.forget_requests()
        assert copying.look() == "nothing"
        assert faulty.num_requests == 1
    publish(run, 8)
    assert "versions" in {copying.look() for _ in range(2)}
    assert copying.copy_versions().versions == 1
    run.board.begin_epoch("math", "w2")
    assert "epoch" in {copying.look() for _ in range(6)}


def test_following_brings_versions_merged_patches_and_epochs(
    source: Board, target: Board, tmp_path: Path
) -> None:
    now_s = [0.0]
    stopped, seen = threading.Event(), Copied()
    copying = copier(source, target, tmp_path)

    def note(copied: Copied) -> None:
        seen.add(copied)
        now_s[0] += 40.0  # a round over everything is due again
        if seen.newest.get("math") == 6 and seen.merged and seen.epochs == 1:
            stopped.set()

    def clock() -> float:
        return now_s[0]

    thread = threading.Thread(
        target=follow,
        args=(copying, stopped),
        kwargs={"interval_s": 0.005, "on_copied": note, "clock": clock},
    )
    thread.start()
    try:
        run = new_run(source)
        now_s[0] += 10_000.0
        source.begin_epoch("math", "w")
        publish_through(run, 6)
        put_merged(run, 0, 4)
        now_s[0] += 10_000.0
        assert stopped.wait(60)
    finally:
        stopped.set()
        thread.join(60)
    assert content(target.store) == content(source.store)


def test_following_outlives_faults_but_not_conflicts(
    run: Run, target: Board, store: FaultyStore, tmp_path: Path
) -> None:
    publish(run, 1)
    run.board.begin_epoch("math", "w")
    fault = store.fail("manifest.json", operations=("put",), times=8)
    stopped = threading.Event()
    arrived: list[Copied] = []

    def note(copied: Copied) -> None:
        arrived.append(copied)
        publish(target.open_run("math"), 2)
        publish(run, 2)

    with pytest.raises(CopyConflictError):
        follow(copier(run.board, target, tmp_path), stopped, interval_s=0.001, on_copied=note)
    assert fault.num_hits == 8
    assert arrived[0].versions == 1
