"""Publishing and reading through a store that loses replies, lies, stalls and fills up."""

from __future__ import annotations

import logging
import threading
import traceback
from pathlib import Path

import pytest
from board_kit import NO_WAITS, digest, heartbeat, manifest, new_run, publish, publish_through

from stitch.board import Board, Patience, keys, probe_create_if_absent
from stitch.board.heads import Heads
from stitch.board.stores.store import ObstoreStore, PutMode, memory_store
from stitch.errors import (
    CorruptBlobError,
    PublishConflictError,
    StoreError,
    StoreFullError,
    StoreUnsuitableError,
    VersionNotFoundError,
)
from stitch.publish import Publisher
from stitch.testing.faults import READS, FaultyStore


@pytest.fixture
def store(board: Board) -> FaultyStore:
    return FaultyStore(board.store)


@pytest.fixture
def faulty(store: FaultyStore) -> Board:
    return Board(store, patience=NO_WAITS)


# --- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_reply_to_the_manifest_is_recognised_as_success(
    faulty: Board, store: FaultyStore, times: int
) -> None:
    run = new_run(faulty)
    fault = store.lose_reply("manifest.json", times=times)
    published = publish(run, 1)
    assert fault.num_hits == times
    assert faulty.open_run("math").manifest(1) == published


def test_a_lost_reply_does_not_turn_a_lost_race_into_a_success(
    faulty: Board, store: FaultyStore
) -> None:
    run = new_run(faulty)
    publish(run, 1, writer="first")
    store.lose_reply("manifest.json")
    with pytest.raises(PublishConflictError, match="by 'first'"):
        publish(faulty.open_run("math"), 1)


def test_a_passing_conflict_is_tried_again_and_is_no_phantom_version(
    faulty: Board, store: FaultyStore
) -> None:
    run = new_run(faulty)
    fault = store.conflict("manifest.json")
    publish(run, 1)
    assert fault.num_hits == 1
    assert run.newest() == 1


def test_a_store_that_claims_a_key_for_ever_ends_in_an_error_not_in_a_version(
    faulty: Board, store: FaultyStore
) -> None:
    run = new_run(faulty)
    store.conflict("manifest.json", times=None)
    with pytest.raises(StoreError, match=r"v/00000001/manifest\.json was created is not known"):
        publish(run, 1)
    store.heal()
    assert faulty.open_run("math").newest() == 0


@pytest.mark.parametrize("match", ["run.json", "schema-", "epochs/", "w", "manifest.json"])
def test_errors_before_a_write_leave_the_board_as_it_was(
    faulty: Board, store: FaultyStore, match: str
) -> None:
    def begin_and_publish() -> None:
        faulty.begin_epoch("math", "w")
        publish(new_run(faulty), 1)

    new_run(faulty, "other")
    store.fail(match, operations=("put",), times=None)
    with pytest.raises(StoreError):
        begin_and_publish()
    store.heal()
    if "math" in faulty.runs():
        run = faulty.open_run("math")
        assert run.newest() == 0
    else:
        run = new_run(faulty)
    publish(run, 1)
    assert faulty.open_run("math").newest() == 1


@pytest.mark.parametrize("match", [".patch", "manifest.json"])
def test_a_full_store_keeps_the_newest_version_and_recovers(
    faulty: Board, store: FaultyStore, match: str
) -> None:
    run = new_run(faulty)
    publish(run, 1)
    store.fill_up(match)
    with pytest.raises(StoreFullError):
        publish(run, 2)
    assert faulty.open_run("math").newest() == 1
    publish(run, 2)
    assert faulty.open_run("math").newest() == 2


def test_an_unknown_outcome_is_settled_by_committing_the_same_manifest_again(
    faulty: Board, store: FaultyStore
) -> None:
    run = new_run(faulty)
    ref = run.put_blob(1, "w-0.patch", b"x")
    record = manifest(run, 1, (ref,))
    store.lose_reply("manifest.json", times=None)
    reads = store.fail("manifest.json", operations=("get",), times=None)
    with pytest.raises(StoreError, match="not known"):
        run.commit(record)
    assert reads.num_hits == 0
    store.heal()
    run.commit(record)
    assert run.newest() == 1


def test_a_lost_reply_to_a_run_an_epoch_or_a_blob_is_a_success(
    faulty: Board, store: FaultyStore
) -> None:
    for match in ("run.json", "epochs/"):
        store.lose_reply(match)
    run = new_run(faulty)
    assert faulty.begin_epoch("math", "w").epoch == 1
    store.lose_reply(".patch")
    with pytest.raises(StoreError):
        run.put_blob(1, "w-0.patch", b"x")
    assert run.read_blob(1, run.put_blob(1, "w-0.patch", b"x")) == b"x"


def test_heads_are_coalesced_while_the_store_refuses_them(store: FaultyStore) -> None:
    now_s = 100.0
    heads = Heads(store, "math", clock=lambda: now_s)
    store.fail("head.json", operations=("put",), times=3)
    for version in range(1, 21):
        heads.write(version)
        now_s += 0.1
    assert store.counts["put"] == 2  # at 0 s, and after a pause of 1 s
    now_s += 60
    heads.write(21)
    now_s += 60
    heads.write(22)
    assert heads.version() == 22


def test_a_failing_head_never_fails_a_publish(
    faulty: Board, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(faulty)
    store.fail("head.json", times=None)
    with caplog.at_level(logging.WARNING, logger="stitch.board"):
        publish(run, 1)
        run.write_head(1)
    assert "event=head_not_written version=1" in caplog.text
    assert faulty.open_run("math").newest() == 1


# --- reading -----------------------------------------------------------------------------------


def test_a_manifest_that_is_not_visible_yet_is_waited_for(
    faulty: Board, store: FaultyStore
) -> None:
    run = new_run(faulty)
    publish_through(run, 3)
    run.write_head(3)
    reader = faulty.open_run("math")
    fault = store.hide("v/00000003/manifest.json", times=4)
    assert reader.manifest(3).version == 3
    assert fault.num_hits == 4


def test_a_version_known_to_exist_is_missing_only_after_all_tries(
    board: Board, store: FaultyStore
) -> None:
    waits_s: list[float] = []
    patience = Patience(num_tries=5, first_wait_s=0.1, max_wait_s=0.3, sleep=waits_s.append)
    faulty = Board(store, patience=patience)
    run = new_run(faulty)
    publish_through(run, 2)
    run.write_head(2)
    reader = faulty.open_run("math")
    store.hide("v/00000002/manifest.json", times=None)
    with pytest.raises(VersionNotFoundError):
        reader.manifest(2)
    assert len(waits_s) == 4
    assert all(0.05 <= wait_s <= 0.3 for wait_s in waits_s)
    store.heal()
    assert reader.manifest(2).version == 2
    assert reader.newest() == 2


def test_a_version_beyond_the_newest_is_missing_at_once(board: Board, store: FaultyStore) -> None:
    def fail(wait_s: float) -> None:
        raise AssertionError("waited for a version that nobody published")

    run = new_run(Board(store, patience=Patience(sleep=fail)))
    publish_through(run, 2)
    run.write_head(2)
    with pytest.raises(VersionNotFoundError, match="newest is 2"):
        run.manifest(3)


def test_a_hidden_newest_version_is_only_late(faulty: Board, store: FaultyStore) -> None:
    run = new_run(faulty)
    publish_through(run, 3)
    reader = faulty.open_run("math")
    store.hide("v/00000003/manifest.json", times=2)
    assert [reader.newest(after=2), reader.newest(after=2), reader.newest(after=2)] == [2, 2, 3]


def test_a_blob_that_is_not_visible_yet_is_waited_for(faulty: Board, store: FaultyStore) -> None:
    run = new_run(faulty)
    published = publish(run, 1, b"patch")
    store.hide(".patch", times=3)
    assert run.read_blob(1, published.blobs[0]) == b"patch"


@pytest.mark.parametrize("damage", ["short", "flipped", "replayed"])
def test_a_damaged_body_is_refused_and_the_next_read_is_good(
    faulty: Board, store: FaultyStore, damage: str
) -> None:
    run = new_run(faulty)
    data = bytes(range(200))
    published = publish(run, 1, data)
    if damage == "short":
        store.shorten(".patch", keep=150)
    elif damage == "flipped":
        store.flip(".patch", offset=-1)
    else:
        store.replace(".patch", data[:20] + data)
    with pytest.raises(CorruptBlobError, match=r"math/v/00000001/.*\.patch has"):
        run.read_blob(1, published.blobs[0])
    assert run.read_blob(1, published.blobs[0]) == data


def test_read_errors_are_retryable_and_named(faulty: Board, store: FaultyStore) -> None:
    run = new_run(faulty)
    publish(run, 1)
    store.fail("manifest.json", operations=READS)
    with pytest.raises(StoreError):
        faulty.open_run("math").newest()
    assert faulty.open_run("math").newest() == 1


def test_nothing_but_runs_heartbeats_and_anchors_needs_listing(
    faulty: Board, store: FaultyStore
) -> None:
    store.fail(operations=("list",), times=None)
    run = new_run(faulty)
    faulty.begin_epoch("math", "w")
    publish_through(run, 9)
    run.write_head(9)
    run.put_heartbeat(heartbeat())
    reader = faulty.open_run("math")
    assert reader.newest() == 9
    assert reader.manifest(4).digest_after == digest(4)
    current = faulty.current_epoch()
    assert current is not None
    assert current.epoch == 1
    assert store.counts["list"] == 0


# --- the probe and the messages ----------------------------------------------------------------


class CarelessStore(ObstoreStore):
    """Ignores the condition of a create, as some servers do."""

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        return super().put(key, source, mode="overwrite")


def careless_store(name: str) -> CarelessStore:
    return CarelessStore(memory_store(name)._backend, "memory://careless")


def test_a_store_that_ignores_create_if_absent_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    store = careless_store(f"careless{tmp_path}")
    with pytest.raises(StoreUnsuitableError, match="create-if-absent"):
        probe_create_if_absent(store)
    with pytest.raises(StoreUnsuitableError):
        new_run(Board(store))
    with pytest.raises(StoreUnsuitableError):
        Board(store).begin_epoch("math", "w")
    assert list(store.list_objects("math")) == []


class RacyStore(ObstoreStore):
    """Looks first and writes afterwards: right in turn, wrong when two come at the same time."""

    def __init__(self, name: str) -> None:
        super().__init__(memory_store(name)._backend, "memory://racy")
        self._both_looked = threading.Barrier(2)

    def put(self, key: str, source: bytes | Path, *, mode: PutMode) -> bool:
        if self.head(key) is not None:
            return False
        if isinstance(source, bytes) and source.startswith(b"racer"):
            self._both_looked.wait(timeout=30)
        return super().put(key, source, mode="overwrite")


def test_a_store_that_keeps_the_condition_only_in_turn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnsuitableError, match="at the same time, it accepted 2"):
        probe_create_if_absent(RacyStore(f"racy{tmp_path}"), NO_WAITS)


@pytest.mark.parametrize("fault", ["fail", "lose_reply", "conflict", "hide"])
@pytest.mark.parametrize("after", range(4))
def test_an_answer_that_got_lost_does_not_condemn_a_store(
    faulty: Board, store: FaultyStore, fault: str, after: int
) -> None:
    plan = getattr(store, fault)(keys.PROBE_FOLDER, after=after)
    probe_create_if_absent(store, NO_WAITS)
    assert plan.num_hits == 1


def test_a_publisher_refuses_an_unsuitable_store_before_it_reads_its_base(tmp_path: Path) -> None:
    board = Board(careless_store(f"start{tmp_path}"))
    with pytest.raises(StoreUnsuitableError, match="create-if-absent"):
        Publisher.start(board, "r", tmp_path / "no-such-base")


def test_the_probe_leaves_nothing_behind(board: Board) -> None:
    probe_create_if_absent(board.store)
    assert list(board.store.list_objects(keys.PROBE_FOLDER)) == []


SECRETS = [
    "AKIAEXAMPLE",
    "X-Amz-Signature",
    "s3cr3t",
    "hunter2",
    "https://",
    "Debug source",
    "/srv/",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Generic S3 error: Error performing PUT https://AKIAEXAMPLE:hunter2@b.example/k?"
            "X-Amz-Signature=s3cr3t in 1.2s - Server returned non-2xx status code: 503\n\n"
            'Debug source:\nGeneric { url: "https://b.example/?X-Amz-Signature=s3cr3t" }',
            StoreError,
        ),
        ("Unable to copy to /srv/data: No space left on device (os error 28)", StoreFullError),
        ("/srv/x: Disk quota exceeded (os error 122)\n\nDebug source: /srv/x", StoreFullError),
        ("Unable to open /srv/x: Permission denied (os error 13)", StoreUnsuitableError),
        ("/srv/x: Read-only file system (os error 30)", StoreUnsuitableError),
        ("/srv/x: Input/output error (os error 5)", StoreError),
    ],
)
def test_store_errors_are_sorted_and_leak_nothing(
    text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def broken(*args: object, **kwargs: object) -> None:
        raise GenericError(text)

    store = memory_store(f"leaks{tmp_path}")
    for name in ("put", "get", "head", "list", "list_with_delimiter", "delete"):
        monkeypatch.setattr(obstore, name, broken)
    calls = [
        lambda: store.put("math/run.json", b"", mode="create"),
        lambda: store.get("math/run.json", max_bytes=1),
        lambda: store.head("math/run.json"),
        lambda: store.get_range("math/run.json", 0, 1),
        lambda: list(store.list_objects("math/run.json")),
        lambda: store.list_folders("math/run.json"),
        lambda: store.delete("math/run.json"),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        assert "math/run.json" in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        message_lines = [line for line in shown.splitlines() if not line.startswith("  ")]
        assert not [secret for secret in SECRETS if secret in "\n".join(message_lines)]
