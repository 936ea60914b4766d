"""The control interface over HTTP: parts, lost replies, hanging and dying engines."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engine_kit import TOKEN, Served, until
from group_kit import asgi_app

from stitch.codec import DigestState, UpdateSet
from stitch.engines import wire
from stitch.engines.control import ControlClient
from stitch.engines.control_routes import control_app
from stitch.engines.group.control_asgi import ControlAsgi
from stitch.engines.parts import PartsBox, split_update
from stitch.errors import BaseMismatchError, EngineError, EngineUnreachableError, UsageError
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import BASE, NEXT, dense_update, flip_update
from stitch.testing.fake_engine import FakeEngine, fake_engine_app
from stitch.testing.synthetic import synthetic_schema, synthetic_weights
from stitch.types import Schema, TensorSpec

SCHEMA = synthetic_schema(hidden=16, layers=1)


@dataclass
class Setup:
    engine: FakeEngine
    client: ControlClient
    weights: HostWeights
    url: str

    async def bind(self) -> None:
        await self.client.bind(BASE, DigestState.of(self.weights).version_digest())

    async def stage(self, stage_id: str = "a") -> UpdateSet:
        update = flip_update(self.weights, 1)
        await self.client.stage(stage_id, BASE, NEXT, update)
        return update

    async def raw(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        if "data" in fields:
            fields["data"] = io.BytesIO(fields["data"])
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{self.url}{wire.PREFIX}/{path}", **fields) as response,
        ):
            return response.status, await response.json()


def asgi_host(engine: FakeEngine) -> web.Application:
    control = ControlAsgi(TOKEN)
    control.serve(engine, SCHEMA)
    app = asgi_app(control)

    @web.middleware
    async def silent_when_dead(request: web.Request, handler: Any) -> web.StreamResponse:
        answer: web.StreamResponse = await handler(request)
        if engine.dead and request.transport is not None:
            request.transport.close()
        return answer

    app.middlewares.append(silent_when_dead)
    return app


@pytest.fixture(params=["aiohttp", "asgi"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    engine = FakeEngine(synthetic_weights(SCHEMA))
    app = asgi_host(engine) if request.param == "asgi" else fake_engine_app(engine, TOKEN)
    async with Served(app) as url:
        client = ControlClient(url, TOKEN, schema=SCHEMA, timeout_s=60.0, describe_timeout_s=60.0)
        yield Setup(engine, client, synthetic_weights(SCHEMA), url)
        engine.faults.release.set()
        await client.close()


def opening(stage_id: str = "a") -> dict[str, Any]:
    base, target = wire.ref_to_json(BASE), wire.ref_to_json(NEXT)
    return {"stage_id": stage_id, "base": base, "target": target}


@pytest.mark.parametrize("make", [lambda it: flip_update(it, 1, per_tensor=40), dense_update])
def test_split_updates_are_small_and_add_up(make: Any) -> None:
    weights = synthetic_weights(SCHEMA)
    update = make(weights)
    parts = list(split_update(update, max_bytes=600))
    assert len(parts) > 3
    assert max(part.num_bytes for part in parts) <= 600
    box = PartsBox(SCHEMA)
    for number, part in enumerate(parts):
        box.put(number, part.to_bytes(SCHEMA))
    whole = box.seal(len(parts), update.num_changed)
    other = synthetic_weights(SCHEMA)
    update.apply(weights)
    whole.apply(other)
    assert DigestState.of(weights).version_digest() == DigestState.of(other).version_digest()


def test_an_empty_update_is_one_part() -> None:
    assert [part.num_changed for part in split_update(UpdateSet([]))] == [0]


async def test_parts_may_come_in_any_order_and_twice(setup: Setup) -> None:
    update = flip_update(setup.weights, 1, per_tensor=40)
    parts = [part.to_bytes(SCHEMA) for part in split_update(update, max_bytes=600)]
    await setup.bind()
    await setup.raw("POST", "stage", json=opening())
    for number in [*reversed(range(len(parts))), 0]:
        status, _ = await setup.raw("PUT", f"stage/a/parts/{number}", data=parts[number])
        assert status == 200
    seal = {"num_parts": len(parts), "num_changed": update.num_changed}
    assert (await setup.raw("POST", "stage/a/seal", json=seal))[0] == 200
    await setup.client.commit("a")
    update.apply(setup.weights)
    report = await setup.client.verify()
    assert report.digest == DigestState.of(setup.weights).version_digest()


@pytest.mark.parametrize(
    ("num_parts", "num_changed", "problem"),
    [(2, 0, "missing"), (0, 0, "announced"), (1, 99, "announced")],
)
async def test_a_stage_with_missing_parts_or_changes_is_not_sealed(
    setup: Setup, num_parts: int, num_changed: int, problem: str
) -> None:
    await setup.bind()
    await setup.raw("POST", "stage", json=opening())
    await setup.raw("PUT", "stage/a/parts/0", data=UpdateSet([]).to_bytes(SCHEMA))
    seal = {"num_parts": num_parts, "num_changed": num_changed}
    status, body = await setup.raw("POST", "stage/a/seal", json=seal)
    assert (status, body["error"]["type"]) == (400, "UsageError")
    assert problem in body["error"]["message"]
    assert setup.engine.ref == BASE
    with pytest.raises(EngineError):
        await setup.client.commit("a")


async def test_a_part_sent_again_with_other_bytes_is_refused(setup: Setup) -> None:
    await setup.bind()
    await setup.raw("POST", "stage", json=opening())
    assert (await setup.raw("PUT", "stage/a/parts/0", data=b"one"))[0] == 200
    assert (await setup.raw("PUT", "stage/a/parts/0", data=b"two"))[0] == 400


async def test_a_change_of_many_megabytes_arrives() -> None:
    schema = Schema.of([TensorSpec.of("w", "BF16", (3_000_000,))])
    engine, weights = FakeEngine(HostWeights.allocate(schema)), HostWeights.allocate(schema)
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        client = ControlClient(url, TOKEN, schema=schema)
        await client.bind(BASE, DigestState.of(weights).version_digest())
        update = dense_update(weights)
        await client.stage("a", BASE, NEXT, update)
        await client.commit("a")
        await client.close()
    update.apply(weights)
    assert (engine.weights.words("w") == weights.words("w")).all()


async def test_damaged_parts_are_refused_when_sealed(setup: Setup) -> None:
    update = flip_update(setup.weights, 1)
    await setup.bind()
    await setup.raw("POST", "stage", json=opening())
    await setup.raw("PUT", "stage/a/parts/0", data=update.to_bytes(SCHEMA)[:-3])
    seal = {"num_parts": 1, "num_changed": update.num_changed}
    status, body = await setup.raw("POST", "stage/a/seal", json=seal)
    assert (status, body["error"]["type"]) == (400, "CorruptPatchError")


async def test_parts_of_a_replaced_stage_are_refused(setup: Setup) -> None:
    await setup.bind()
    await setup.raw("POST", "stage", json=opening("a"))
    await setup.raw("POST", "stage", json=opening("b"))
    status, body = await setup.raw("PUT", "stage/a/parts/0", data=b"")
    assert (status, body["error"]["type"]) == (409, "EngineError")


async def test_more_parts_than_any_change_needs_are_refused(setup: Setup) -> None:
    await setup.bind()
    await setup.raw("POST", "stage", json=opening())
    huge = bytes(16 * SCHEMA.num_bytes + 2**22)
    status, body = await setup.raw("PUT", "stage/a/parts/0", data=huge)
    assert status == 400
    assert "rewrite of every tensor" in body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "bind", {}),
        ("POST", "bind", {"run": "a/b", "version": 0, "digest": "0"}),
        ("POST", "bind", {"run": "a", "version": -1, "digest": "0"}),
        ("POST", "stage", {"stage_id": ""}),
        ("POST", "stage", {"stage_id": "a", "base": {"run": "r", "version": "1"}}),
        ("POST", "commit", {}),
        ("POST", "roll_back", {"run": "r"}),
        ("POST", "commit", ["a"]),
    ],
)
async def test_malformed_calls_are_refused(setup: Setup, method: str, path: str, body: Any) -> None:
    status, answer = await setup.raw(method, path, json=body)
    assert (status, answer["error"]["type"]) == (400, "UsageError")


async def test_a_wrong_token_is_a_usage_error(setup: Setup) -> None:
    client = ControlClient(setup.url, "not the right token", schema=SCHEMA)
    with pytest.raises(UsageError, match="token"):
        await client.describe()
    await client.close()


def test_a_short_token_is_not_accepted() -> None:
    with pytest.raises(UsageError, match="16"):
        control_app(FakeEngine(synthetic_weights(SCHEMA)), schema=SCHEMA, token="short")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "nowhere", 404), ("GET", "commit", 405), ("PATCH", "stage", 405)],
)
async def test_other_paths_and_methods_are_refused(
    setup: Setup, method: str, path: str, status: int
) -> None:
    found, body = await setup.raw(method, path)
    assert (found, body["error"]["type"]) == (status, "UsageError")


async def test_an_engine_that_is_not_ready_yet_is_unreachable() -> None:
    control = ControlAsgi(TOKEN)
    async with Served(asgi_app(control)) as url:
        client = ControlClient(url, TOKEN, schema=SCHEMA)
        with pytest.raises(EngineUnreachableError, match="not ready"):
            await client.describe()
        control.serve(FakeEngine(synthetic_weights(SCHEMA)), SCHEMA)
        assert (await client.describe()).ref is None
        await client.close()


async def test_errors_keep_their_class_over_http(setup: Setup) -> None:
    with pytest.raises(BaseMismatchError):
        await setup.client.bind(BASE, "f" * 32)


async def test_a_stage_id_may_hold_any_text(setup: Setup) -> None:
    await setup.bind()
    await setup.stage("a/b ?#%2F€")
    assert (await setup.client.describe()).staged == "a/b ?#%2F€"
    await setup.client.commit("a/b ?#%2F€")


async def test_a_failed_stage_leaves_the_old_version(setup: Setup) -> None:
    await setup.bind()
    setup.engine.faults.stage_failures = 1
    with pytest.raises(EngineError, match="injected"):
        await setup.stage()
    await setup.stage()
    await setup.client.commit("a")
    assert setup.engine.ref == NEXT


async def test_a_failed_commit_is_undone_and_can_be_repeated(setup: Setup) -> None:
    await setup.bind()
    update = await setup.stage()
    setup.engine.faults.commit_failures = 1
    with pytest.raises(EngineError, match="undone"):
        await setup.client.commit("a")
    report = await setup.client.verify()
    assert (report.ref, report.digest) == (BASE, DigestState.of(setup.weights).version_digest())
    await setup.client.commit("a")
    update.apply(setup.weights)
    assert (await setup.client.verify()).digest == DigestState.of(setup.weights).version_digest()


async def test_when_the_undo_fails_the_engine_is_gone(setup: Setup) -> None:
    await setup.bind()
    await setup.stage()
    setup.engine.faults.commit_failures = 1
    setup.engine.faults.undo_fails = True
    with pytest.raises(EngineUnreachableError):
        await setup.client.commit("a")
    with pytest.raises(EngineUnreachableError):
        await setup.client.describe()


async def test_a_lost_reply_is_learnt_from_the_description(setup: Setup) -> None:
    await setup.bind()
    await setup.stage()
    setup.engine.faults.lose_reply.add("commit")
    with pytest.raises(EngineUnreachableError):
        await setup.client.commit("a")
    it = await setup.client.describe()
    assert (it.ref, it.committed, it.staged) == (NEXT, "a", None)
    assert (await setup.client.commit("a")).ref == NEXT


async def test_an_engine_that_hangs_is_unreachable_after_the_time_limit(setup: Setup) -> None:
    setup.engine.faults.hang.add("describe")
    client = ControlClient(setup.url, TOKEN, schema=SCHEMA, describe_timeout_s=0.1)
    with pytest.raises(EngineUnreachableError, match=r"0\.1 s"):
        await client.describe()
    await client.close()


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    client = ControlClient("http://127.0.0.1:9", TOKEN, schema=SCHEMA)
    with pytest.raises(EngineUnreachableError):
        await client.describe()
    await client.close()


async def test_a_commit_whose_caller_left_is_finished(setup: Setup) -> None:
    await setup.bind()
    await setup.stage()
    setup.engine.faults.commit_gate = gate = asyncio.Semaphore(0)
    task = asyncio.create_task(setup.client.commit("a"))

    async def committing() -> bool:
        return (await setup.client.describe()).state == "committing"

    async def committed() -> bool:
        return (await setup.client.describe()).ref == NEXT

    await until(committing)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gate.release()
    await until(committed)
    assert (await setup.client.describe()).committed == "a"
