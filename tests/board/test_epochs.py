"""Epochs: the highest number wins, whatever clocks, races and damage say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from board_kit import NO_WAITS

from stitch.board import Board, keys
from stitch.testing.faults import FaultyStore


def test_there_is_no_epoch_at_first(board: Board) -> None:
    assert board.current_epoch() is None


def test_each_epoch_is_above_the_last_and_is_the_current_one(board: Board) -> None:
    for number in range(1, 12):
        record = board.begin_epoch(f"run-{number}", f"writer-{number}")
        assert record.epoch == number
        assert board.current_epoch() == record
        assert Board(board.store).current_epoch() == record


def test_racing_publishers_get_different_epochs_and_agree_on_the_highest(board: Board) -> None:
    def begin(number: int) -> int:
        return Board(board.store, patience=NO_WAITS).begin_epoch("math", f"w{number}").epoch

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(begin, range(8)))
    assert sorted(numbers) == list(range(1, 9))
    current = board.current_epoch()
    assert current is not None
    assert current.writer == f"w{numbers.index(8)}"


def test_clocks_that_are_an_hour_off_do_not_decide_who_owns_the_board(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now_s, writer in ((7200.0, "fast"), (0.0, "slow"), (3600.0, "right")):
        monkeypatch.setattr("stitch.board.epochs.time.time", lambda now_s=now_s: now_s)
        board.begin_epoch("math", writer)
        current = Board(board.store).current_epoch()
        assert current is not None
        assert current.writer == writer


def test_asking_again_costs_one_request(board: Board) -> None:
    store = FaultyStore(board.store)
    counted = Board(store, patience=NO_WAITS)
    for number in range(1, 8):
        counted.begin_epoch("math", f"w{number}")
    reader = Board(store)
    assert reader.current_epoch() is not None
    store.forget_requests()
    reader.current_epoch()
    counted.current_epoch(after=7)
    assert store.requests == [("get", keys.epoch(8))] * 2


@pytest.mark.parametrize("damage", [b"", b"\0" * 80, b"{", b'{"format":1}'])
def test_a_damaged_epoch_names_nobody_and_its_number_stays_taken(
    board: Board, damage: bytes
) -> None:
    first = board.begin_epoch("math", "w1")
    board.store.put(keys.epoch(2), damage, mode="create")
    assert Board(board.store).current_epoch() == first
    third = Board(board.store, patience=NO_WAITS).begin_epoch("math", "w3")
    assert third.epoch == 3
    assert Board(board.store).current_epoch() == third
    assert board.current_epoch() == third


def test_stray_names_beside_the_epochs_are_ignored(board: Board) -> None:
    for stray in ("latest.json", "7.json", "000000009.json"):
        board.store.put(f"epochs/{stray}", b"{}", mode="create")
    assert board.current_epoch() is None
    assert board.begin_epoch("math", "w").epoch == 1


def test_an_epoch_whose_answer_was_damaged_once_is_seen_by_the_next_look(board: Board) -> None:
    """A publisher that remembered the damage would never learn that it was replaced."""
    board.begin_epoch("math", "w1")
    store = FaultyStore(board.store)
    first = Board(store, patience=NO_WAITS)
    second = board.begin_epoch("math", "w2")
    store.shorten(keys.epoch(2), times=2)
    found = first.current_epoch(after=1)
    assert found is not None
    assert found.writer == "w1"
    assert first.current_epoch(after=1) == second
