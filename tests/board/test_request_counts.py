"""What a poll and a publish cost in requests, on a short log and on a long one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from board_kit import NO_WAITS, fill, publish

from stitch.board import Board
from stitch.board.stores.store import memory_store
from stitch.testing.faults import FaultyStore

SHORT, LONG = 10, 10_000


def cost(store: FaultyStore, call: Callable[[], object]) -> list[str]:
    """The kinds of requests that `call` makes, in order."""
    store.forget_requests()
    call()
    return [operation for operation, _ in store.requests]


def costs(board: Board, newest: int) -> dict[str, list[str]]:
    fill(board, newest)
    store = FaultyStore(board.store)
    counted = Board(store, patience=NO_WAITS)
    counted.begin_epoch("math", "w")
    run = counted.open_run("math")
    found = {
        "first look": cost(store, run.newest),
        "idle poll": cost(store, lambda: run.newest(newest)),
        "idle poll of the epoch": cost(store, lambda: counted.current_epoch(after=1)),
        "first publish": cost(store, lambda: publish(run, newest + 1)),
        "second publish": cost(store, lambda: publish(run, newest + 2)),
        "head": cost(store, lambda: run.write_head(newest + 2)),
    }
    reader = counted.open_run("math")
    found["poll that finds one"] = cost(store, lambda: reader.newest(newest + 1))
    assert reader.newest() == newest + 2
    return found


def test_a_poll_of_an_idle_board_costs_one_request(memory_board: Board) -> None:
    found = costs(memory_board, SHORT)
    assert found["idle poll"] == ["get"]
    assert found["idle poll of the epoch"] == ["get"]


def test_what_polls_and_publishes_cost_does_not_grow_with_the_log(tmp_path: Path) -> None:
    boards = [
        Board(memory_store(f"{tmp_path}/{newest}"), patience=NO_WAITS) for newest in (SHORT, LONG)
    ]
    short, long = (
        costs(board, newest) for board, newest in zip(boards, (SHORT, LONG), strict=True)
    )
    assert short == long
    assert max(len(requests) for requests in long.values()) <= 6
