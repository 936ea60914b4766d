"""Requests on the wire: what a poll and a publish cost on a short log and on a long one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from board_kit import fill, publish
from store_kit import OpenBoard
from store_servers import Server

from stitch.testing.fault_proxy import FaultProxy


def cost(proxy: FaultProxy, call: Callable[[], object]) -> list[str]:
    """The methods of the requests that `call` makes, in order."""
    proxy.forget_requests()
    call()
    return [method for method, _ in proxy.requests]


def costs(
    server: Server, open_on: OpenBoard, proxy: FaultProxy, newest: int
) -> dict[str, list[str]]:
    prefix = server.fresh_prefix()
    fill(open_on(server, prefix), newest)
    board = open_on(server, prefix, port=proxy.port)
    board.begin_epoch("math", "w")
    run = board.open_run("math")
    return {
        "first look": cost(proxy, run.newest),
        "idle poll": cost(proxy, lambda: run.newest(newest)),
        "idle poll of the epoch": cost(proxy, lambda: board.current_epoch(after=1)),
        "first publish": cost(proxy, lambda: publish(run, newest + 1)),
        "second publish": cost(proxy, lambda: publish(run, newest + 2)),
        "head": cost(proxy, lambda: run.write_head(newest + 2)),
        "poll that finds one": cost(proxy, lambda: board.open_run("math").newest(newest + 1)),
    }


def test_a_poll_of_an_idle_board_costs_one_request_on_the_wire(
    server: Server, open_on: OpenBoard, proxy: FaultProxy
) -> None:
    found = costs(server, open_on, proxy, 10)
    assert found["idle poll"] == ["GET"]
    assert found["idle poll of the epoch"] == ["GET"]


@pytest.mark.timeout(300)
def test_the_cost_does_not_grow_from_10_to_10000_versions(
    seaweedfs: Server, open_on: OpenBoard
) -> None:
    with FaultProxy(seaweedfs.endpoint) as proxy:
        short = costs(seaweedfs, open_on, proxy, 10)
        assert costs(seaweedfs, open_on, proxy, 10_000) == short
    assert max(len(requests) for requests in short.values()) <= 6
