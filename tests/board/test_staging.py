"""Half-fetched blobs: gone on with, believed only by their hash, and nobody else's business."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import fetch_child
import pytest
from board_kit import NO_WAITS, new_run

from stitch.board import Board, Staging, open_board
from stitch.board.stores.store import ObjectStore
from stitch.board.transfers.blobs import put_blob
from stitch.board.transfers.staging import KEEP_S
from stitch.board.transfers.transfer import PIECE_BYTES
from stitch.errors import CorruptBlobError, StoreError, StoreFullError, StoreUnsuitableError
from stitch.records import BlobRef
from stitch.testing.faults import FaultyStore

KEY = "math/v/00000001/w-0.patch"
NUM_PIECES = 6


@pytest.fixture(scope="module")
def data() -> bytes:
    """Some pieces and a bit, all different."""
    return random.Random(1).randbytes(NUM_PIECES * PIECE_BYTES - 1000)


@pytest.fixture
def store(memory_board: Board) -> FaultyStore:
    return FaultyStore(memory_board.store)


@pytest.fixture
def ref(store: FaultyStore, data: bytes) -> BlobRef:
    return put_blob(store, KEY, "w-0.patch", data, NO_WAITS)


def fetch(folder: Path, store: ObjectStore, ref: BlobRef) -> tuple[bytes, list[int]]:
    with Staging(folder) as staging:
        gained = list(staging.fetch(store, KEY, ref, NO_WAITS))
        return staging.read(ref), gained


def begin(folder: Path, ref: BlobRef, beginning: bytes) -> Path:
    folder.mkdir(mode=0o700)
    path = folder / f"{ref.blake3}.partial"
    path.write_bytes(beginning)
    return path


def test_a_fetch_that_fails_midway_is_gone_on_with(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    store.fail(KEY, operations=("get_range",), after=4, times=None)
    with pytest.raises(StoreError, match="planned fault"):
        fetch(tmp_path / "s", store, ref)
    staged = (tmp_path / "s" / f"{ref.blake3}.partial").stat().st_size
    assert staged == 4 * PIECE_BYTES
    store.heal()
    store.forget_requests()
    whole, gained = fetch(tmp_path / "s", store, ref)
    assert whole == data
    assert gained[0] == staged
    assert sum(gained) == ref.num_bytes
    assert store.counts["get_range"] == 2  # the pieces that were missing


def test_others_that_leave_the_folder_empty_take_nothing_away(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    with Staging(tmp_path / "s") as staging:
        with Staging(tmp_path / "s"):
            pass  # and removes what it found empty
        assert not (tmp_path / "s").exists()
        assert sum(staging.fetch(store, KEY, ref, NO_WAITS)) == ref.num_bytes
        assert staging.read(ref) == data


def test_a_spoilt_beginning_is_fetched_anew(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    spoilt = bytearray(data[:PIECE_BYTES])
    spoilt[17] ^= 1
    begin(tmp_path / "s", ref, bytes(spoilt))
    whole, gained = fetch(tmp_path / "s", store, ref)
    assert whole == data
    assert sum(gained) == ref.num_bytes


def test_a_beginning_longer_than_the_blob_is_dropped(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    begin(tmp_path / "s", ref, data + b"more")
    assert fetch(tmp_path / "s", store, ref)[0] == data


def test_a_whole_staged_blob_is_not_asked_for_again(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    begin(tmp_path / "s", ref, data)
    store.forget_requests()
    assert fetch(tmp_path / "s", store, ref) == (data, [len(data)])
    assert store.num_requests == 0


def test_a_damaged_blob_leaves_nothing(tmp_path: Path, store: FaultyStore, ref: BlobRef) -> None:
    store.flip(KEY, offset=3, times=None)
    with pytest.raises(CorruptBlobError, match=r"w-0\.patch has BLAKE3"):
        fetch(tmp_path / "s", store, ref)
    assert not (tmp_path / "s").exists()


def test_a_full_disk_gives_its_space_back(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("stitch.board.transfers.staging.os.fsync", full)
        with pytest.raises(StoreFullError, match="No space left"):
            fetch(tmp_path / "s", store, ref)
    assert not (tmp_path / "s").exists()
    assert fetch(tmp_path / "s", store, ref)[0] == data


def test_two_at_one_blob_do_not_write_into_each_other(
    tmp_path: Path, store: FaultyStore, ref: BlobRef, data: bytes
) -> None:
    with Staging(tmp_path / "s") as first:
        fetching = first.fetch(store, KEY, ref, NO_WAITS)
        assert next(fetching) == 0
        whole, gained = fetch(tmp_path / "s", store, ref)
        assert whole == data
        assert gained[0] == 0
        for _ in fetching:
            pass
        first.take(ref, tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == data
    assert not (tmp_path / "s").exists()


def test_old_beginnings_are_swept_and_fresh_ones_stay(
    tmp_path: Path, store: FaultyStore, ref: BlobRef
) -> None:
    old = begin(tmp_path / "s", ref, b"old")
    fresh = tmp_path / "s" / "0.partial"
    fresh.write_bytes(b"fresh")
    long_ago_s = old.stat().st_mtime - KEEP_S - 10
    os.utime(old, (long_ago_s, long_ago_s))
    with Staging(tmp_path / "s"):
        pass
    assert list((tmp_path / "s").iterdir()) == [fresh]


def test_a_planted_link_is_not_followed(tmp_path: Path, store: FaultyStore, ref: BlobRef) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / f"{ref.blake3}.partial").symlink_to(victim)
    with pytest.raises(StoreError):
        fetch(tmp_path / "s", store, ref)
    assert victim.read_bytes() == b"precious"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for name in ("open", "link"):
        with (
            pytest.raises(StoreUnsuitableError, match="scratch directory"),
            Staging(tmp_path / name),
        ):
            pass


@pytest.mark.parametrize("pass_number", [1, 4])
def test_a_killed_fetch_is_gone_on_with_by_the_next_process(
    tmp_path: Path, data: bytes, pass_number: int
) -> None:
    board = open_board(tmp_path / "board", patience=NO_WAITS)
    run = new_run(board)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(data)
    record = run.write_anchor(0, tmp_path / "in", writer="w")
    killed = subprocess.run(
        [sys.executable, fetch_child.__file__, str(tmp_path / "board"), str(tmp_path / "out")],
        env=os.environ | {"STITCH_FAILPOINT": f"board.staged:{pass_number}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (staged,) = (tmp_path / ".out.partial").iterdir()
    assert staged.stat().st_size == pass_number * PIECE_BYTES
    counting = FaultyStore(board.store)
    reader = Board(counting, patience=NO_WAITS).open_run("math")
    reader.fetch_anchor(record, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == data
    assert counting.counts["get_range"] == NUM_PIECES - pass_number
    assert not (tmp_path / ".out.partial").exists()
