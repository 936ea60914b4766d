"""The log of a run: publishing, conflicts, gaps, and finding the newest version."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from board_kit import (
    NO_WAITS,
    SCHEMA,
    digest,
    manifest,
    new_run,
    publish,
    publish_through,
    run_record,
)

from stitch.board import Board, keys, open_board
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    CorruptRecordError,
    PublishConflictError,
    RunExistsError,
    RunNotFoundError,
    SchemaMismatchError,
    StoreUnsuitableError,
    UsageError,
    VersionNotFoundError,
)
from stitch.records import BlobRef
from stitch.testing.faults import FaultyStore
from stitch.types import Schema, TensorSpec


@pytest.fixture
def store(memory_board: Board) -> FaultyStore:
    return FaultyStore(memory_board.store)


@pytest.fixture
def counted(store: FaultyStore) -> Board:
    """A board whose requests are counted."""
    return Board(store, patience=NO_WAITS)


# --- boards and runs ---------------------------------------------------------------------------


def test_a_published_version_is_read_back_by_another_opener(board: Board) -> None:
    run = new_run(board)
    published = publish(run, 1, b"the patch")
    other = board.open_run("math")
    assert other.newest() == 1
    assert other.manifest(1) == published
    assert list(other.manifests(1, 2)) == [published]
    assert other.read_blob(1, published.blobs[0]) == b"the patch"
    assert other.schema == run.schema == SCHEMA
    assert other.record == run.record
    assert board.runs() == ["math"]


def test_boards_are_opened_by_path_and_by_address(tmp_path: Path) -> None:
    new_run(open_board(tmp_path / "a board"))
    for where in (str(tmp_path / "a board"), (tmp_path / "a board").as_uri()):
        assert open_board(where, create=False).runs() == ["math"]
    new_run(open_board("memory://shared-in-process"))
    assert open_board("memory://shared-in-process").runs() == ["math"]
    assert open_board("memory://another").runs() == []
    with pytest.raises(StoreUnsuitableError, match="no directory"):
        open_board(tmp_path / "missing", create=False)
    assert not (tmp_path / "missing").exists()
    for where, message in (("ftp://host/x", "ftp://"), ("", "needs a place")):
        with pytest.raises(UsageError, match=message):
            open_board(where)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnsuitableError, match="not a directory"):
        open_board(tmp_path / "file")


def test_a_run_name_is_taken_once(board: Board) -> None:
    new_run(board)
    with pytest.raises(RunExistsError, match="'math', created by trainer-0 from /models/base"):
        new_run(board, writer="trainer-1")


def test_a_missing_run_names_its_neighbours(board: Board) -> None:
    with pytest.raises(RunNotFoundError, match="no runs at all"):
        board.open_run("math")
    new_run(board, "math-7b")
    new_run(board, "code")
    with pytest.raises(RunNotFoundError, match="math-7b"):
        board.open_run("math7b")
    with pytest.raises(UsageError):
        board.open_run("../math")


def test_folders_without_a_run_record_are_no_runs(board: Board) -> None:
    new_run(board)
    board.begin_epoch("math", "w")
    board.put_asset("half-made", "config.json", b"{}")
    board.store.put("lost+found/x", b"", mode="create")
    assert board.runs() == ["math"]


def test_a_run_is_created_only_with_its_own_schema_and_assets(board: Board) -> None:
    with pytest.raises(UsageError, match="schema"):
        board.create_run(run_record(schema_digest="0" * 32), SCHEMA)
    absent = BlobRef(name="config.json", num_bytes=2, blake3="ab" * 32)
    with pytest.raises(CorruptBlobError, match=r"config\.json"):
        board.create_run(run_record(assets=(absent,)), SCHEMA)
    ref = board.put_asset("math", "config.json", b"{}")
    run = board.create_run(run_record(assets=(ref,)), SCHEMA)
    assert run.read_asset(ref) == b"{}"
    assert run.put_asset("config.json", b"{}") == ref


@pytest.mark.parametrize("data", [b"", b"\x28\xb5\x2f\xfd garbage", b"{}"])
def test_a_damaged_schema_is_an_error_that_names_its_key(board: Board, data: bytes) -> None:
    new_run(board)
    board.store.put(keys.schema("math", SCHEMA.digest), data, mode="overwrite")
    with pytest.raises(CorruptRecordError, match=r"math/schema-\w+\.json\.zst"):
        _ = board.open_run("math").schema


def test_a_schema_bomb_is_refused_without_unpacking_it(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(board)
    monkeypatch.setattr("stitch.board.schemas.MAX_SCHEMA_BYTES", 20)
    with pytest.raises(CorruptRecordError, match="unpacks to more than 20 bytes"):
        _ = run.schema


def test_a_schema_of_other_tensors_under_the_runs_digest_is_refused(board: Board) -> None:
    from stitch.board.schemas import pack_schema

    run = new_run(board)
    other = Schema.of([TensorSpec.of("x", "F32", (1,))])
    key = keys.schema("math", SCHEMA.digest)
    board.store.put(key, pack_schema(other), mode="overwrite")
    with pytest.raises(CorruptRecordError, match="digest"):
        _ = run.schema


# --- publishing --------------------------------------------------------------------------------


def test_only_the_first_of_two_writers_publishes_a_version(board: Board) -> None:
    run = new_run(board)
    first = publish(run, 1, writer="trainer-a", epoch=1)
    other = board.open_run("math")
    ref = other.put_blob(1, "other-0.patch", b"x")
    late = manifest(other, 1, (ref,), writer="trainer-b", epoch=2)
    with pytest.raises(
        PublishConflictError, match=r"math@1 was published by 'trainer-a' at .*epoch 1"
    ):
        other.commit(late)
    assert board.open_run("math").manifest(1) == first
    assert run.newest() == 1


def test_of_16_racing_publishers_one_wins_each_version(board: Board) -> None:
    new_run(board)

    def race(number: int) -> str | None:
        run = board.open_run("math")
        ref = run.put_blob(1, f"w{number}-0.patch", b"patch %d" % number)
        try:
            run.commit(manifest(run, 1, (ref,), attempt=f"attempt {number}"))
        except PublishConflictError:
            return None
        return f"attempt {number}"

    with ThreadPoolExecutor(16) as pool:
        won = [attempt for attempt in pool.map(race, range(16)) if attempt]
    assert won == [board.open_run("math").manifest(1).attempt]


def test_committing_the_same_manifest_again_is_a_success(board: Board) -> None:
    run = new_run(board)
    published = publish(run, 1)
    run.commit(published)
    board.open_run("math").commit(published)
    assert run.newest() == 1


def test_a_version_cannot_leave_a_gap_or_go_back(board: Board) -> None:
    run = new_run(board)
    publish(run, 1)
    ref = run.put_blob(3, "w-0.patch", b"x")
    with pytest.raises(VersionNotFoundError, match=r"math@3 would leave a gap.*no version 2"):
        run.commit(manifest(run, 3, (ref,)))
    publish(run, 2)
    with pytest.raises(PublishConflictError):
        publish(run, 1, created_unix_s=9e9)
    assert run.newest() == 2


def test_a_version_must_start_from_what_the_one_before_it_ends_in(board: Board) -> None:
    run = new_run(board)
    with pytest.raises(BaseMismatchError, match="version 0 is"):
        publish(run, 1, digest_before=digest(9))
    publish(run, 1)
    with pytest.raises(BaseMismatchError, match=r"version 1 is .* diff against version 1"):
        publish(run, 2, digest_before=digest(0))
    with pytest.raises(SchemaMismatchError):
        publish(run, 2, schema_digest="0" * 32)
    with pytest.raises(UsageError, match="'other'"):
        run.commit(dataclasses.replace(run.manifest(1), run="other"))
    assert board.open_run("math").newest() == 1


def test_nothing_is_announced_before_its_blobs_are_there(board: Board) -> None:
    run = new_run(board)
    absent = BlobRef(name="absent-0.patch", num_bytes=3, blake3="ab" * 32)
    with pytest.raises(CorruptBlobError, match=r"v/00000001/absent-0\.patch"):
        run.commit(manifest(run, 1, (absent,)))
    short = run.put_blob(1, "short-0.patch", b"abc")
    board.store.put("math/v/00000001/short-0.patch", b"ab", mode="overwrite")
    with pytest.raises(CorruptBlobError, match="has 2 bytes, wanted 3"):
        run.commit(manifest(run, 1, (short,)))
    assert board.open_run("math").newest() == 0


def test_a_patch_that_changes_nothing_still_makes_a_version(board: Board) -> None:
    run = new_run(board)
    published = publish(run, 1, digest_after=digest(0))
    assert run.newest() == 1
    assert published.digest_before == published.digest_after


def test_a_blob_name_that_is_taken_by_other_content_is_a_conflict(board: Board) -> None:
    run = new_run(board)
    ref = run.put_blob(1, "w-0.patch", b"one")
    assert run.put_blob(1, "w-0.patch", b"one") == ref
    with pytest.raises(PublishConflictError, match=r"v/00000001/w-0\.patch"):
        run.put_blob(1, "w-0.patch", b"two")
    assert run.read_blob(1, ref) == b"one"


def test_a_lower_version_is_refused_whatever_the_clocks_say(board: Board) -> None:
    run = new_run(board)
    for version, skew_s in ((1, 0.0), (2, -3600.0), (3, 3600.0)):
        publish(run, version, created_unix_s=1_700_000_000.0 + skew_s)
    assert board.open_run("math").newest() == 3
    with pytest.raises(PublishConflictError):
        publish(run, 2, created_unix_s=1_800_000_000.0)


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", [1, 2, 3, 7, 8, 9, 10, 23, 100])
def test_newest_finds_the_end_with_and_without_a_head(memory_board: Board, newest: int) -> None:
    run = new_run(memory_board)
    publish_through(run, newest)
    assert memory_board.open_run("math").newest() == newest
    run.write_head(newest)
    assert memory_board.open_run("math").newest() == newest
    for after in range(newest + 1):
        assert memory_board.open_run("math").newest(after=after) == newest


def test_an_idle_poll_costs_exactly_one_request(counted: Board, store: FaultyStore) -> None:
    run = new_run(counted)
    publish_through(run, 12)
    run.write_head(12)
    reader = counted.open_run("math")
    for after in (12, None):
        reader.newest(after)
        store.forget_requests()
        assert reader.newest(after) == 12
        assert store.requests == [("get", "math/v/00000013/manifest.json")]


def test_a_poll_that_finds_the_next_version_costs_two_and_its_manifest_none(
    counted: Board, store: FaultyStore
) -> None:
    run = new_run(counted)
    publish_through(run, 5)
    reader = counted.open_run("math")
    store.forget_requests()
    assert reader.newest(after=4) == 5
    assert reader.manifest(5).version == 5
    assert store.num_requests == 2


def test_a_head_makes_a_far_jump_cheap(counted: Board, store: FaultyStore) -> None:
    run = new_run(counted)
    publish_through(run, 200)
    run.write_head(200)
    reader = counted.open_run("math")
    store.forget_requests()
    assert reader.newest() == 200
    assert store.num_requests <= 6


@pytest.mark.parametrize(
    "head",
    [b"", b"\0" * 40, b"garbage", b"{}", b'{"format":1,"run":"math","version":99}',
     b'{"format":1,"run":"math","version":2}', b'{"format":1,"run":"other","version":7}',
     b'{"format":7}', b'{"format":1,"run":"math","version":99999999}',
     b'{"format":1,"run":"math","version":-1}', b"x" * 100_000],
)  # fmt: skip
def test_a_wrong_head_is_harmless(memory_board: Board, head: bytes) -> None:
    run = new_run(memory_board)
    publish_through(run, 7)
    memory_board.store.put(keys.head("math"), head, mode="overwrite")
    reader = memory_board.open_run("math")
    assert reader.newest() == 7
    assert reader.manifest(7).version == 7
    with pytest.raises(VersionNotFoundError, match="no version 8; the newest is 7"):
        reader.manifest(8)


def test_a_head_past_a_gap_is_not_followed(memory_board: Board) -> None:
    run = new_run(memory_board)
    publish_through(run, 9)
    run.write_head(9)
    memory_board.store.delete(keys.manifest("math", 8))
    assert memory_board.open_run("math").newest() == 7


def test_versions_are_ordered_as_numbers(memory_board: Board) -> None:
    run = new_run(memory_board)
    ref = BlobRef(name="w-0.patch", num_bytes=1, blake3="ab" * 32)
    for version in (9, 10, 99, 100, 999_998, 999_999, 1_000_000):
        data = manifest(run, version, (ref,)).to_json_bytes()
        memory_board.store.put(keys.manifest("math", version), data, mode="create")
    for stray in ("latest", "7", "000000010"):
        memory_board.store.put(f"math/v/{stray}/manifest.json", b"{}", mode="create")
    for after, newest in ((8, 10), (98, 100), (999_997, 1_000_000)):
        run.write_head(newest)
        assert memory_board.open_run("math").newest(after=after) == newest


@pytest.mark.parametrize("torn", [b"", b"\0" * 700])
def test_a_torn_manifest_is_no_version_and_its_number_can_be_published(
    board: Board, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(board)
    publish_through(run, 2)
    board.store.put(keys.manifest("math", 3), torn, mode="create")
    board.store.put(keys.head("math"), b'{"format":1,"run":"math","version":3}', mode="create")
    with caplog.at_level(logging.WARNING, logger="stitch.board"):
        reader = board.open_run("math")
        assert [reader.newest(), reader.newest(after=2), reader.newest()] == [2, 2, 2]
    assert caplog.text.count("v/00000003/manifest.json") == 1
    with pytest.raises(CorruptRecordError, match=r"v/00000003/manifest\.json: .*empty or all zero"):
        reader.manifest(3)
    published = publish(board.open_run("math"), 3)
    assert reader.newest() == 3
    assert reader.manifest(3) == published


def test_a_garbled_manifest_blocks_its_number_instead_of_being_replaced(board: Board) -> None:
    run = new_run(board)
    publish_through(run, 2)
    board.store.put(keys.manifest("math", 3), b'{"format":1,"ver', mode="create")
    assert board.open_run("math").newest() == 2
    with pytest.raises(CorruptRecordError, match=r"v/00000003/manifest\.json"):
        publish(run, 3)
    assert board.store.get(keys.manifest("math", 3), max_bytes=99) == b'{"format":1,"ver'


def test_a_torn_manifest_is_replaced_by_one_claimant_only(board: Board) -> None:
    run = new_run(board)
    board.store.put(keys.manifest("math", 1), b"", mode="create")
    board.store.put(keys.torn_claim("math", 1), b"someone else", mode="create")
    with pytest.raises(CorruptRecordError, match=r"torn\.json says that a writer was replacing it"):
        publish(run, 1)


def test_readers_pass_over_a_damaged_manifest_below_the_newest(board: Board) -> None:
    run = new_run(board)
    publish_through(run, 5)
    board.store.put(keys.manifest("math", 3), b"\0" * 100, mode="overwrite")
    reader = board.open_run("math")
    assert reader.newest(after=2) == 5
    with pytest.raises(CorruptRecordError, match="v/00000003"):
        reader.manifest(3)


def test_a_manifest_under_another_versions_key_is_refused(board: Board) -> None:
    run = new_run(board)
    publish_through(run, 3)
    board.store.put(keys.manifest("math", 2), run.manifest(3).to_json_bytes(), mode="overwrite")
    with pytest.raises(CorruptRecordError, match="say math@3, wanted math@2"):
        board.open_run("math").manifest(2)


def test_version_zero_and_unpublished_versions_have_no_manifest(board: Board) -> None:
    run = new_run(board)
    assert run.newest() == 0
    assert run.digest(0) == digest(0)
    with pytest.raises(VersionNotFoundError, match="version 0 of run 'math' is its base"):
        run.manifest(0)
    with pytest.raises(VersionNotFoundError, match="no version 1; the newest is 0"):
        run.manifest(1)
    with pytest.raises(UsageError):
        run.manifest(-1)


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "missing"])
def test_a_wrong_blob_is_refused_by_key(board: Board, damage: str) -> None:
    run = new_run(board)
    published = publish(run, 1, b"0123456789")
    (ref,) = published.blobs
    key = keys.blob("math", 1, ref.name)
    if damage == "missing":
        board.store.delete(key)
    else:
        data = {"short": b"01234", "long": b"0123456789a", "flipped": b"1123456789"}[damage]
        board.store.put(key, data, mode="overwrite")
    with pytest.raises(CorruptBlobError, match=key):
        run.read_blob(1, ref)


def test_manifests_are_read_once_and_forgotten_in_order(
    counted: Board, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch.board.manifests.CACHE_SIZE", 2)
    run = new_run(counted)
    publish_through(run, 3)
    reader = counted.open_run("math")
    for version in (1, 2, 1, 3, 1):
        reader.manifest(version)
    reads = [key for operation, key in store.requests if "manifest" in key and operation == "get"]
    store.forget_requests()
    reader.manifest(1)
    assert store.num_requests == 0
    reader.manifest(2)
    assert store.num_requests == 1
    assert reads


def test_many_threads_share_one_run(board: Board) -> None:
    run = new_run(board)

    def work(number: int) -> int:
        run.put_blob(1, f"t{number}-0.patch", secrets.token_bytes(64))
        return run.newest()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(32))) == {0}
    publish_through(run, 4)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda v: run.manifest(v % 4 + 1).run, range(64))) == {"math"}


def test_an_oversized_record_is_damage_and_hides_nothing_behind_it(memory_board: Board) -> None:
    run = new_run(memory_board)
    publish_through(run, 3)
    for key in (keys.manifest("math", 2), keys.head("math")):
        memory_board.store.put(key, b"{" + b" " * 2**25, mode="overwrite")
    assert memory_board.open_run("math").newest() == 3
    with pytest.raises(CorruptRecordError, match="has 33554433 bytes"):
        memory_board.open_run("math").manifest(2)
    memory_board.begin_epoch("math", "w1")
    memory_board.store.put(keys.epoch(2), b"{" + b" " * 2**21, mode="create")
    epoch = Board(memory_board.store, patience=NO_WAITS).current_epoch()
    assert epoch is not None
    assert epoch.writer == "w1"


@pytest.mark.parametrize("newest", [0, 2])
def test_nothing_is_published_on_a_board_that_was_emptied(tmp_path: Path, newest: int) -> None:
    board = open_board(tmp_path / "board", patience=NO_WAITS)
    run = new_run(board)
    publish_through(run, newest)
    (tmp_path / "board").rename(tmp_path / "unmounted")
    (tmp_path / "board").mkdir()
    with pytest.raises(VersionNotFoundError, match="is this still the same board"):
        publish(run, newest + 1)
    assert not list((tmp_path / "board").rglob("manifest.json"))


def test_a_forked_process_is_refused_instead_of_hanging(tmp_path: Path) -> None:
    code = """
import os, sys
from stitch.board import open_board
from stitch.errors import StoreUnsuitableError
board = open_board(sys.argv[1])
early = os.fork()
if early == 0:
    os._exit(len(board.runs()))
assert os.waitpid(early, 0)[1] == 0, "a process forked before the first use may use a board"
board.runs()
late = os.fork()
if late == 0:
    codes = []
    for call in (board.runs, lambda: board.store.put("a", b"", mode="create")):
        try:
            call()
        except StoreUnsuitableError as error:
            codes.append("forked" in str(error))
    os._exit(7 if codes == [True, True] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "board")], check=True, timeout=60)
