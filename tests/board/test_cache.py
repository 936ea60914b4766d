"""The cache of a host: one download, never a wrong byte, and nobody depends on it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cache_child
import pytest
from board_kit import NO_WAITS, new_run, publish

from stitch.board import BlobCache, Board, Run, Staging, open_board
from stitch.board.transfers.caching_store import CachingStore
from stitch.board.transfers.transfer import PIECE_BYTES
from stitch.errors import CorruptBlobError, StoreError, StoreUnsuitableError, UsageError
from stitch.records import BlobRef
from stitch.testing.faults import FaultyStore

NUM_PIECES = 4
LARGE = 2**40


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(3).randbytes(NUM_PIECES * PIECE_BYTES - 1000)


@pytest.fixture
def store(memory_board: Board) -> FaultyStore:
    return FaultyStore(memory_board.store)


@pytest.fixture
def run(store: FaultyStore, data: bytes) -> Run:
    """Version 1 has a blob of some pieces, version 2 a small one."""
    run = new_run(Board(store, patience=NO_WAITS))
    publish(run, 1, data)
    publish(run, 2, b"small")
    store.forget_requests()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def reader(
    store: FaultyStore,
    folder: Path,
    max_bytes: int = LARGE,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """As another process of the host would read."""
    caching = CachingStore(store, BlobCache(folder, max_bytes=max_bytes), sleep=sleep)
    return Board(caching, patience=NO_WAITS).open_run("math")


def blob(run: Run, version: int = 1) -> BlobRef:
    (ref,) = run.manifest(version).blobs
    return ref


def read(run: Run, version: int = 1) -> bytes:
    return run.read_blob(version, blob(run, version))


def downloads(store: FaultyStore, match: str = ".patch") -> int:
    """Requests for content of blobs."""
    return sum(match in key and op in ("get", "get_range") for op, key in store.requests)


def entry(folder: Path, ref: BlobRef) -> Path:
    return folder / f"{ref.blake3}.blob"


def partial(folder: Path, ref: BlobRef) -> Path:
    return folder / f"{ref.blake3}-{ref.num_bytes}.partial"


def test_a_blob_is_fetched_once_for_all(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    for number in range(4):
        assert read(reader(store, folder)) == data
        assert read(reader(store, folder), 2) == b"small"
        assert downloads(store) == NUM_PIECES + 1, number
    assert {path.name for path in folder.iterdir()} == {
        entry(folder, blob(run, version)).name for version in (1, 2)
    }


def test_many_at_once_fetch_it_once(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    start = threading.Barrier(8)

    def work(_: int) -> bool:
        each = reader(store, folder)
        start.wait(30)
        return read(each) == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert downloads(store) == NUM_PIECES


def test_staged_blobs_anchors_and_assets_come_over_it(
    run: Run, store: FaultyStore, folder: Path, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(data[::-1])
    record = run.write_anchor(2, tmp_path / "in", writer="w")
    store.forget_requests()
    for number in range(3):
        path = reader(store, folder).fetch_anchor(record, tmp_path / f"out{number}")
        assert (path / "model.safetensors").read_bytes() == data[::-1]
    assert downloads(store, ".safetensors") == NUM_PIECES


def test_a_half_staged_blob_goes_on_from_the_cache(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    staged = folder.parent / "staged"
    staged.mkdir(mode=0o700)
    (staged / f"{blob(run).blake3}.partial").write_bytes(data[: PIECE_BYTES + 7])
    for _ in range(2):  # on its way into the cache, and out of it
        each = reader(store, folder)
        with Staging(staged) as staging:
            for _ in each.stage_blob(staging, 1, blob(each)):
                pass
            assert staging.read(blob(each)) == data
            staging.path(blob(each)).write_bytes(data[: 3 * PIECE_BYTES])
    assert downloads(store) == NUM_PIECES


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
def test_a_damaged_entry_is_dropped_and_fetched_again(
    run: Run, store: FaultyStore, folder: Path, data: bytes, damage: str
) -> None:
    read(reader(store, folder))
    path = entry(folder, blob(run))
    bad = {
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "short": data[:-1],
        "long": data + b"x",
        "empty": b"",
    }[damage]
    path.write_bytes(bad)
    assert read(reader(store, folder)) == data
    assert path.read_bytes() == data
    assert downloads(store) == 2 * NUM_PIECES


def test_a_damaged_blob_of_the_store_never_becomes_an_entry(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    store.flip(".patch", offset=5, times=NUM_PIECES)
    with pytest.raises(CorruptBlobError, match="BLAKE3"):
        read(reader(store, folder))
    assert list(folder.iterdir()) == []
    assert read(reader(store, folder)) == data


def test_a_missing_blob_leaves_nothing(run: Run, store: FaultyStore, folder: Path) -> None:
    store.hide(".patch", times=None)
    for version in (1, 2):
        with pytest.raises(CorruptBlobError, match="does not have it"):
            read(reader(store, folder), version)
    assert list(folder.iterdir()) == []


def test_a_fetch_that_failed_is_gone_on_with(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    store.fail(".patch", operations=("get_range",), after=2, times=None)
    with pytest.raises(StoreError):
        read(reader(store, folder))
    assert partial(folder, blob(run)).stat().st_size == 2 * PIECE_BYTES
    store.heal()
    store.forget_requests()
    assert read(reader(store, folder)) == data
    assert downloads(store) == NUM_PIECES - 2
    assert entry(folder, blob(run)).read_bytes() == data


@pytest.mark.parametrize("kept", [10, 2 * PIECE_BYTES, None])
def test_a_spoilt_beginning_is_fetched_anew(
    run: Run, store: FaultyStore, folder: Path, data: bytes, kept: int | None
) -> None:
    cached = reader(store, folder)
    partial(folder, blob(run)).write_bytes(b"?" + data[1:kept])
    assert read(cached) == data
    assert entry(folder, blob(run)).read_bytes() == data
    assert not partial(folder, blob(run)).exists()


@pytest.mark.parametrize(
    "failpoint", ["cache.written:1", "cache.written:3", "cache.piece:2", "cache.filled"]
)
def test_whoever_is_killed_leaves_nothing_that_misleads(
    tmp_path: Path, folder: Path, data: bytes, failpoint: str
) -> None:
    publish(new_run(open_board(tmp_path / "board")), 1, data)
    command = [sys.executable, cache_child.__file__, str(tmp_path / "board"), str(folder)]

    def child(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=60
        )

    killed = child({"STITCH_FAILPOINT": failpoint})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = child({})
    assert done.returncode == 0, done.stderr
    ref = blob(open_board(tmp_path / "board").open_run("math"))
    assert done.stdout.strip() == ref.blake3
    assert [path.name for path in folder.iterdir()] == [entry(folder, ref).name]


# --- room ------------------------------------------------------------------------------------


def many(store: FaultyStore, count: int) -> Run:
    run = Board(store, patience=NO_WAITS).open_run("math")
    for version in range(3, 3 + count):
        publish(run, version, bytes([version]) * 1000)
    return run


def test_what_was_used_longest_ago_is_evicted(run: Run, store: FaultyStore, folder: Path) -> None:
    run = many(store, 4)
    cached = reader(store, folder, max_bytes=3000)
    for version in (3, 4, 5, 3, 6):
        assert read(cached, version) == bytes([version]) * 1000
    names = {path.name for path in folder.iterdir()}
    assert names == {entry(folder, blob(run, version)).name for version in (5, 3, 6)}


def test_the_bound_holds_with_many_at_once(run: Run, store: FaultyStore, folder: Path) -> None:
    many(store, 12)

    def work(seed: int) -> None:
        cached = reader(store, folder, max_bytes=4000)
        for version in random.Random(seed).choices(range(3, 15), k=60):
            assert read(cached, version) == bytes([version]) * 1000

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(work, range(4)):
            pass
    # Only now: a folder that others change meanwhile has no size of one moment to be read.
    assert 0 < used_bytes(folder) <= 4000


def used_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_reader_does_not_notice_that_its_entry_is_evicted(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    cached = reader(store, folder)
    read(cached)
    store.forget_requests()
    pieces = cached.board.store.open_blob(  # type: ignore[attr-defined]
        f"math/v/00000001/{blob(run).name}", blob(run), NO_WAITS
    )
    first = next(pieces)
    entry(folder, blob(run)).unlink()
    assert first + b"".join(pieces) == data
    assert downloads(store) == 0


def test_a_blob_larger_than_the_cache_is_read_past_it(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    for _ in range(2):
        assert read(reader(store, folder, max_bytes=len(data) - 1)) == data
    assert downloads(store) == 2 * NUM_PIECES
    assert list(folder.iterdir()) == []


def test_an_abandoned_beginning_makes_room_and_one_under_way_does_not(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    cached = reader(store, folder, max_bytes=len(data), sleep=lambda _: None)
    path = partial(folder, blob(run))
    path.write_bytes(data[:100])
    with path.open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        assert read(cached, 2) == b"small"
        assert [each.name for each in folder.iterdir()] == [path.name]
    assert read(cached, 2) == b"small"
    assert [each.name for each in folder.iterdir()] == [entry(folder, blob(run, 2)).name]


# --- nobody depends on it --------------------------------------------------------------------


def test_a_full_disk_is_read_past(
    run: Run, store: FaultyStore, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = reader(store, folder)
    writes = 0

    def fills_up(descriptor: int, piece: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return actual(descriptor, piece[:17])

    actual: Callable[[int, bytes], int] = os.write
    with monkeypatch.context() as patched:
        patched.setattr("stitch.board.transfers.cache.os.write", fills_up)
        assert read(cached) == data
        assert writes == 2
        assert list(folder.iterdir()) == []
        partial(folder, blob(run)).write_bytes(data[:1000])  # and when it is gone on with
        assert read(cached) == data
    assert list(folder.iterdir()) == []
    assert read(cached) == data
    assert entry(folder, blob(run)).read_bytes() == data


def test_a_cache_that_vanishes_is_read_past(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    cached = reader(store, folder)
    folder.rmdir()
    assert read(cached) == data
    folder.write_bytes(b"a file")
    assert read(cached) == data


def test_one_who_stands_still_is_passed_by(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    cached = reader(store, folder, sleep=lambda _: None)
    path = partial(folder, blob(run))
    path.write_bytes(data[:100])
    with path.open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        assert read(cached) == data
    assert path.read_bytes() == data[:100]


def test_a_publishers_checks_do_not_ask_the_cache(
    run: Run, store: FaultyStore, folder: Path, data: bytes
) -> None:
    cached = reader(store, folder)
    read(cached)
    key = f"math/v/00000001/{blob(run).name}"
    store.put(key, data[:-1] + b"?", mode="overwrite")
    with pytest.raises(Exception, match="another writer's blob"):
        cached.put_blob(1, blob(run).name, data)


def test_a_folder_that_cannot_be_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(StoreError, match="cache"):
        BlobCache(tmp_path / "file", max_bytes=1)
    for name in ("open", "link"):
        with pytest.raises(StoreUnsuitableError, match="another directory"):
            BlobCache(tmp_path / name, max_bytes=1)
    with pytest.raises(UsageError, match="above 0"):
        BlobCache(tmp_path / "cache", max_bytes=0)


def test_a_planted_link_is_not_followed(
    run: Run, store: FaultyStore, folder: Path, data: bytes, tmp_path: Path
) -> None:
    cached = reader(store, folder)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    partial(folder, blob(run)).symlink_to(victim)
    entry(folder, blob(run, 2)).symlink_to(victim)
    assert (read(cached), read(cached, 2)) == (data, b"small")
    assert victim.read_bytes() == b"precious"
