"""What every object store behind a board must do: one pytest suite, run on each implementation.

Subclass it and give a fresh store:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path): return open_directory(tmp_path, create=True)
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from stitch.board.stores.probe import probe_create_if_absent
from stitch.board.stores.store import ObjectStore
from stitch.board.stores.store_errors import ObjectTooLargeError
from stitch.board.transfers.transfer import PIECE_BYTES, read_ahead
from stitch.errors import StoreError

NUM_RACERS = 16
BIG_BYTES = 33 * 2**20
"""More than one part of an upload and more than one piece of a download."""


class StoreContract:
    """The tests. `store` must be empty and may be slow."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        raise NotImplementedError("give a fresh store in your subclass")

    def test_create_if_absent_is_kept(self, store: ObjectStore) -> None:
        probe_create_if_absent(store)

    def test_of_16_racing_creators_exactly_one_wins_and_all_see_its_bytes(
        self, store: ObjectStore
    ) -> None:
        start = threading.Barrier(NUM_RACERS)

        def create(number: int) -> bool:
            start.wait(timeout=30)
            return store.put("race/one", b"writer %02d" % number, mode="create")

        for _ in range(3):
            with ThreadPoolExecutor(NUM_RACERS) as pool:
                won = list(pool.map(create, range(NUM_RACERS)))
            assert won.count(True) == 1
            assert store.get("race/one", max_bytes=100) == b"writer %02d" % won.index(True)
            store.delete("race/one")

    def test_racing_overwriters_leave_one_whole_object(self, store: ObjectStore) -> None:
        bodies = [bytes([number]) * 100_000 for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            written = list(
                pool.map(lambda body: store.put("race/head", body, mode="overwrite"), bodies)
            )
        assert all(written)
        assert store.get("race/head", max_bytes=100_000) in bodies

    def test_create_never_replaces_and_overwrite_always_does(self, store: ObjectStore) -> None:
        assert store.put("a/b", b"first", mode="create") is True
        assert store.put("a/b", b"second", mode="create") is False
        assert store.get("a/b", max_bytes=100) == b"first"
        assert store.put("a/b", b"third", mode="overwrite") is True
        assert store.get("a/b", max_bytes=100) == b"third"
        assert store.put("a/new", b"fourth", mode="overwrite") is True

    def test_what_does_not_exist_is_none(self, store: ObjectStore) -> None:
        assert store.get("no/such", max_bytes=1) is None
        assert store.get_range("no/such", 0, 1) is None
        assert store.head("no/such") is None
        assert list(store.list_objects("no")) == []
        assert store.list_folders("no") == []

    def test_an_empty_object_exists(self, store: ObjectStore) -> None:
        store.put("a/empty", b"", mode="create")
        info = store.head("a/empty")
        assert info is not None
        assert info.num_bytes == 0
        assert store.get("a/empty", max_bytes=0) == b""
        assert store.get_range("a/empty", 0, 1) == b""
        assert store.put("a/empty", b"x", mode="create") is False

    def test_ranges_are_cut_at_the_objects_end(self, store: ObjectStore) -> None:
        store.put("a/b", b"0123456789", mode="create")
        assert store.get_range("a/b", 0, 4) == b"0123"
        assert store.get_range("a/b", 4, 3) == b"456"
        assert store.get_range("a/b", 8, 100) == b"89"
        assert store.get_range("a/b", 10, 5) == b""
        assert store.get_range("a/b", 500, 5) == b""
        assert store.get_range("a/b", 3, 0) == b""

    def test_a_read_refuses_more_than_its_limit(self, store: ObjectStore) -> None:
        store.put("a/b", b"0123456789", mode="create")
        assert store.get("a/b", max_bytes=10) == b"0123456789"
        with pytest.raises(ObjectTooLargeError, match="a/b has 10 bytes, wanted at most 9"):
            store.get("a/b", max_bytes=9)

    def test_listing_names_keys_and_sizes_below_a_folder_only(self, store: ObjectStore) -> None:
        for key in ("r/v/00000001/m", "r/v/00000002/m", "r/v2/x", "r/head", "other/v/y"):
            store.put(key, key.encode(), mode="create")
        found = {info.key: info.num_bytes for info in store.list_objects("r/v")}
        assert found == {"r/v/00000001/m": 14, "r/v/00000002/m": 14}
        assert store.list_folders("r") == ["v", "v2"]
        assert [name for name in store.list_folders("") if not name.startswith(".")] == [
            "other",
            "r",
        ]

    def test_many_objects_are_listed_completely(self, store: ObjectStore) -> None:
        for number in range(120):
            store.put(f"many/{number:03d}", b"", mode="create")
        assert sorted(info.key for info in store.list_objects("many")) == [
            f"many/{number:03d}" for number in range(120)
        ]

    def test_deleting_removes_and_tolerates_absence(self, store: ObjectStore) -> None:
        store.put("a/b", b"x", mode="create")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/there")
        assert store.head("a/b") is None
        assert store.put("a/b", b"y", mode="create") is True

    def test_the_keys_that_a_board_uses_are_taken_as_they_are(self, store: ObjectStore) -> None:
        keys = ["R-1.x_y/run.json", "r/v/00000007/W_1.2-0.patch", ".stitch-probe/abc"]
        for key in keys:
            assert store.put(key, key.encode(), mode="create") is True
        assert [store.get(key, max_bytes=100) for key in keys] == [key.encode() for key in keys]

    def test_big_objects_come_from_files_and_are_read_in_pieces(
        self, store: ObjectStore, tmp_path: Path
    ) -> None:
        block = secrets.token_bytes(2**20)
        source = tmp_path / "source.bin"
        with source.open("wb") as file:
            for _ in range(BIG_BYTES // len(block)):
                file.write(block)
        assert store.put("big/file", source, mode="create") is True
        assert store.put("big/file", source, mode="create") is False
        assert store.put("big/other", source, mode="overwrite") is True
        assert store.put("big/unique", source, mode="unique") is True
        assert store.put("big/unique", source, mode="unique") is False
        assert store.put("big/file", block, mode="unique") is False
        for key in ("big/file", "big/other", "big/unique"):
            info = store.head(key)
            assert info is not None
            assert info.num_bytes == BIG_BYTES
            sizes = []
            for chunk in read_ahead(partial(store.get_range, key), 0, BIG_BYTES, key):
                assert chunk == (block * (len(chunk) // len(block) + 1))[: len(chunk)]
                sizes.append(len(chunk))
            assert sum(sizes) == BIG_BYTES
            assert max(sizes) <= PIECE_BYTES
            assert store.get_range(key, 5 * 2**20 - 3, 6) == block[-3:] + block[:3]

    def test_a_missing_source_file_is_an_error_and_leaves_nothing(
        self, store: ObjectStore, tmp_path: Path
    ) -> None:
        with pytest.raises(StoreError, match="a/b"):
            store.put("a/b", tmp_path / "missing.bin", mode="create")
        assert store.head("a/b") is None
