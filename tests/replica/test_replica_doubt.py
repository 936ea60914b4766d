"""When it is not known what the engine serves, nothing is admitted under the old label."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from replica_kit import Replica, engine_at, hold_commits, replica_of, until
from test_replica_faults import flip
from test_replica_life import publish_more, serves_bits_of

from stitch.engines.control_routes import _Routes
from stitch.errors import EngineUnreachableError, FatalReplicaError
from stitch.testing.fake_engine import FakeEngine
from stitch.testing.published import PublishedRun


async def waiting_requests(replica: Replica, number: int) -> list[asyncio.Task[tuple[int, Any]]]:
    """Requests that a closed gate holds."""
    tasks = [asyncio.create_task(replica.complete()) for _ in range(number)]
    await until(lambda: replica.app.gate.num_waiting == number, "requests held by the gate")
    return tasks


def restart(engine: FakeEngine, published: PublishedRun) -> None:
    """As if the process had been replaced by a fresh one from the base, on the same port."""
    fresh = engine_at(published, 0)
    engine.boot, engine.weights = fresh.boot, fresh.weights
    engine._ref = engine._undo = engine._staged = None


async def hangs_in_commit(replica: Replica, published: PublishedRun) -> None:
    await replica.serves(3)
    replica.engine.faults.hang.add("commit")
    await comes_to_a_commit(replica, published)


async def comes_to_a_commit(replica: Replica, published: PublishedRun) -> None:
    await asyncio.to_thread(publish_more, published, 1)
    await until(lambda: replica.app.gate.is_closed, "the commit")


async def outcomes(tasks: list[asyncio.Task[tuple[int, Any]]]) -> list[int]:
    """Statuses of the answers; 0 for a connection that broke."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for one in found:
        assert isinstance(one, tuple | aiohttp.ClientError), one
    return [one[0] if isinstance(one, tuple) else 0 for one in found]


@pytest.mark.parametrize("stamps_versions", [True, False])
async def test_requests_held_by_a_commit_are_not_admitted_when_a_stop_interrupts_it(
    published: PublishedRun, stamps_versions: bool
) -> None:
    engine = engine_at(published, 0, stamps_versions=stamps_versions)
    async with replica_of(published, engine, drain_s=2.0) as replica:
        await hangs_in_commit(replica, published)
        held = await waiting_requests(replica, 4)
        replica.stop.set()
        assert set(await outcomes(held)) <= {503, 0}
        assert engine.requests == []


async def test_requests_held_by_a_commit_that_cannot_be_resolved_are_not_admitted(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def discard() -> None:
        raise EngineUnreachableError("no answer")

    engine = engine_at(published, 0, stamps_versions=False)
    async with replica_of(published, engine, commit_resolve_s=0.2, drain_s=2.0) as replica:
        await replica.serves(3)
        lost = hold_commits(replica, monkeypatch)
        assert replica.app._committer is not None
        monkeypatch.setattr(replica.app._committer.engine, "discard", discard)
        await comes_to_a_commit(replica, published)
        held = await waiting_requests(replica, 4)
        lost.set()
        assert isinstance(await replica.failure(), FatalReplicaError)
        assert set(await outcomes(held)) <= {503, 0}
        assert engine.requests == []


ODD_ANSWERS: list[tuple[int, object]] = [
    (503, {"detail": "starting"}),
    (404, {"error": {"type": "NotFoundError", "message": "Not Found"}}),
    (200, {}),
    (200, {"engine": 1, "boot": None, "ref": 5}),
]


@pytest.mark.parametrize(("status", "odd"), ODD_ANSWERS)
async def test_answers_of_something_else_than_the_control_interface_are_waited_out(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch, status: int, odd: object
) -> None:
    is_odd, real = True, _Routes.describe

    async def describe(routes: _Routes, request: web.Request) -> web.Response:
        return web.json_response(odd, status=status) if is_odd else await real(routes, request)

    monkeypatch.setattr(_Routes, "describe", describe)
    async with replica_of(published) as replica:
        await until(lambda: "engine" in replica.app.status.doing, "waiting for the engine")
        is_odd = False
        await serves_bits_of(replica, published, 3)
        is_odd = True
        await until(lambda: not replica.app.status.ready, "noticing")
        is_odd = False
        await until(lambda: replica.app.status.ready, "noticing that it is back")


async def test_requests_held_by_a_commit_in_which_the_engine_restarted_wait_for_its_proof(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(published, 0, stamps_versions=False)
    async with replica_of(published, engine) as replica:
        await replica.serves(3)
        lost = hold_commits(replica, monkeypatch)
        await comes_to_a_commit(replica, published)
        held = await waiting_requests(replica, 4)
        restart(engine, published)
        engine.faults.hang |= {"bind", "verify"}  # so that it is not proven before it may be
        lost.set()
        assert set(await outcomes(held)) == {503}
        assert engine.requests == []
        engine.faults.hang.clear()
        engine.faults.release.set()
        await serves_bits_of(replica, published, 4)


@pytest.mark.parametrize("stamps_versions", [True, False])
async def test_an_engine_that_restarted_unseen_never_answers_under_the_old_label(
    published: PublishedRun, stamps_versions: bool
) -> None:
    engine = engine_at(published, 0, stamps_versions=stamps_versions)
    async with replica_of(published, engine, watchdog_interval_s=600.0) as replica:
        await replica.serves(3)
        restart(engine, published)  # before any connection for requests was opened
        statuses = await outcomes([asyncio.create_task(replica.complete()) for _ in range(8)])
        assert set(statuses) <= {502, 503}
        assert engine.requests == []
        await serves_bits_of(replica, published, 3)


async def test_an_engine_that_restarts_while_a_bad_version_is_fetched_is_not_taken_for_the_old_one(
    published: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(published, 0, stamps_versions=False)
    async with replica_of(published, engine, poll_interval_s=600.0, max_backoff_s=600.0) as replica:
        await replica.serves(3)
        reconciler, status = replica.app.reconciler, replica.app.status
        move, first = reconciler._move, engine.boot

        async def move_while_it_restarts(*args: Any) -> Any:
            restart(engine, published)
            await until(lambda: reconciler._reprove, "noticing the restart")
            monkeypatch.undo()
            return await move(*args)

        monkeypatch.setattr(reconciler, "_move", move_while_it_restarts)
        unproven: list[object] = []
        status.listeners.append(lambda: unproven.append(reconciler._reprove and status.ref))
        await asyncio.to_thread(publish_more, published, 1)
        flip(published.blob_path(4))
        replica.app.wake()
        await until(lambda: status.engine and status.engine.boot != first, "the new engine")
        await serves_bits_of(replica, published, 3)
        assert not any(unproven)
