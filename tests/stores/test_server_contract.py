"""The contract of every store, on servers that people run."""

from __future__ import annotations

import pytest

from stitch.board import Board
from stitch.board.stores.store import ObjectStore
from stitch.testing.store_contract import StoreContract


class TestServers(StoreContract):
    @pytest.fixture
    def store(self, board: Board) -> ObjectStore:
        return board.store
