"""Boards, runs and manifests for the board's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from board_kit import NO_WAITS

from stitch.board import Board, open_board
from stitch.board.stores.store import memory_store


@pytest.fixture(params=["memory", "directory"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    """A fresh board in memory and in a directory."""
    where = f"memory://{tmp_path}" if request.param == "memory" else tmp_path / "board"
    return open_board(where, patience=NO_WAITS)


@pytest.fixture
def memory_board(tmp_path: Path) -> Board:
    return Board(memory_store(str(tmp_path)), patience=NO_WAITS)
