"""The fake engine's own promises: answers that tell their weights, faults that can be switched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from engine_kit import TOKEN, Served

from stitch.codec import DigestState
from stitch.testing.engine_contract import BASE, NEXT, flip_update
from stitch.testing.fake_engine import FakeEngine, fake_engine_app, fake_text
from stitch.testing.synthetic import synthetic_schema, synthetic_weights

SCHEMA = synthetic_schema(hidden=16, layers=1)
BODY = {"prompt": "hi", "max_tokens": 4}


async def bound_engine(**options: Any) -> FakeEngine:
    engine = FakeEngine(synthetic_weights(SCHEMA), **options)
    await engine.bind(BASE, DigestState.of(engine.weights).version_digest())
    return engine


async def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def commit_next(engine: FakeEngine) -> None:
    await engine.stage("a", BASE, NEXT, flip_update(engine.weights, 1))
    await engine.commit("a")


async def test_an_answer_depends_on_prompt_and_version_only() -> None:
    engine = await bound_engine()
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        for ref in (BASE, NEXT):
            _, first = await post(url, BODY)
            _, second = await post(url, BODY)
            assert first["choices"] == second["choices"]
            assert first["choices"][0]["text"] == fake_text("hi", 4, ref)
            if ref == BASE:
                await commit_next(engine)


async def test_a_cached_prompt_shows_the_version_it_was_cached_under() -> None:
    engine = await bound_engine(prefix_cache=True)
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        await post(url, BODY)
        await commit_next(engine)
        _, stale = await post(url, BODY)
        _, fresh = await post(url, BODY | {"cache_salt": "v1"})
    assert stale["choices"][0]["text"] != fake_text("hi", 4, NEXT)
    assert stale["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert fresh["choices"][0]["text"] == fake_text("hi", 4, NEXT)


async def test_stamps_can_be_left_out() -> None:
    engine = await bound_engine(stamps_versions=False)
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        _, body = await post(url, BODY)
    assert "weight_version_start" not in body


@pytest.fixture
async def engine() -> FakeEngine:
    return await bound_engine()


@pytest.mark.parametrize("framing", ["plain", "crlf", "events", "bytes"])
async def test_streams_can_be_framed_in_four_ways(engine: FakeEngine, framing: Any) -> None:
    engine.faults.sse = framing
    async with (
        Served(fake_engine_app(engine, TOKEN)) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        raw = await response.read()
    assert (b"\r\n" in raw, b"event:" in raw) == (framing == "crlf", framing == "events")
    data = [line[6:] for line in raw.replace(b"\r", b"").split(b"\n") if line[:6] == b"data: "]
    assert data.pop() == b"[DONE]"
    events = [json.loads(line) for line in data]
    assert events[-1]["weight_versions"] == [[{"version": 0, "start": 0, "end": 4}]]
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == fake_text("hi", 4, BASE)


async def test_tokens_can_be_let_out_one_by_one(engine: FakeEngine) -> None:
    gate = engine.faults.token_gate = asyncio.Semaphore(0)
    tokens = engine.generate("hi", 3)
    gate.release()
    assert (await anext(tokens)).version == 0
    await commit_next(engine)
    gate.release()
    assert (await anext(tokens)).version == 1
    assert engine.running == 1
    await tokens.aclose()
    assert (engine.running, engine.aborted) == (0, 1)


async def test_a_dead_engine_breaks_connections_off(engine: FakeEngine) -> None:
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        engine.faults.die_on.add("generate")
        for _ in range(2):
            with pytest.raises(aiohttp.ClientError):
                await post(url, BODY)


async def test_requests_are_kept_for_inspection(engine: FakeEngine) -> None:
    async with Served(fake_engine_app(engine, TOKEN)) as url:
        await post(url, BODY | {"cache_salt": "s"})
    assert engine.requests[0]["body"]["cache_salt"] == "s"
