"""The stores that ship, held to the contract of every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.board.stores.directory import open_directory
from stitch.board.stores.store import ObjectStore, memory_store
from stitch.testing.faults import FaultyStore
from stitch.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return memory_store(f"contract{tmp_path}")


class TestDirectoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_directory(tmp_path / "board", create=True)


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return FaultyStore(memory_store(f"faulty{tmp_path}"))
