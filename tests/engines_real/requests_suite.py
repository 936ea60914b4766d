"""Requests to a real engine over commits. The test modules bind `OnOneEngine` to an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp
import pytest
from equality import NUM_PATCHES, advance, at
from real_kit import RealEngine, digest_of, greedy
from real_models import make_model

from stitch.engines.control import ControlClient
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import NUM_TOKENS

PROMPT = [5, 6, 7]
LONG_PROMPT = [7 * i % 250 for i in range(300)]
"""More than two blocks of vLLM's prefix cache on CPUs, which are 128 tokens each."""


@dataclass
class Live:
    server: RealEngine
    client: ControlClient
    weights: HostWeights


def body(**more: Any) -> dict[str, Any]:
    return greedy(PROMPT, NUM_TOKENS, **more)


async def events(live: Live, **more: Any) -> AsyncIterator[Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{live.server.url}/v1/completions", json=body(stream=True, **more)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


class OnOneEngine:
    engine: ClassVar[type[RealEngine]]
    twice: ClassVar[dict[str, Any]] = {"prompt": [PROMPT, PROMPT]}
    """How one asks for two greedy choices."""
    own_routes: ClassVar[dict[str, Any]] = {}
    """Further routes of it that generate -> a request for three tokens."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
        place = tmp_path_factory.mktemp("requests")
        server = cls.engine(make_model("untied", place / "model"), place / "log")
        yield server
        server.stop()

    @pytest.fixture
    async def live(self, server: RealEngine) -> AsyncIterator[Live]:
        subject = await server.fresh()
        await subject.engine.bind(at(0), subject.digest)
        client = server.client()
        yield Live(server, client, subject.weights)
        await client.close()
        await subject.engine.close()

    async def test_a_prompt_cached_before_a_commit_is_not_answered_from_the_old_cache(
        self,
        live: Live,
    ) -> None:
        old = live.server.tokens(LONG_PROMPT)
        assert live.server.tokens(LONG_PROMPT) == old  # from the cache now
        await advance(live.client, live.weights, 1)
        stale_or_new = live.server.tokens(LONG_PROMPT)
        uncached = live.server.tokens(LONG_PROMPT, cache_salt="never seen before")
        assert stale_or_new == uncached != old

    async def test_each_token_of_a_stream_is_of_the_version_that_is_said(self, live: Live) -> None:
        old = live.server.tokens(PROMPT, NUM_TOKENS)
        choices: list[list[int]] = [[], []]
        stamp: Any = None
        committed = False
        async for event in events(live, **self.twice):
            if event.get("object") == "stitch.versions":
                stamp = event
            for choice in event["choices"]:
                choices[choice["index"]] += choice.get("token_ids") or []
            if len(choices[1]) >= 20 and not committed:
                committed = True
                await advance(live.client, live.weights, 1)
        assert (stamp["weight_version_start"], stamp["weight_version_end"]) == (0, 1)
        for tokens, spans in zip(choices, stamp["weight_versions"], strict=True):
            (first, second) = spans
            at = first["end"]
            assert first == {"version": 0, "start": 0, "end": at}
            assert second == {"version": 1, "start": at, "end": NUM_TOKENS}
            assert 20 <= at < NUM_TOKENS
            # Before: the old weights' tokens. After: those of the new weights for all before them.
            assert tokens[:at] == old[:at]
            new = live.server.tokens(PROMPT + tokens[:at], NUM_TOKENS - at)
            assert tokens[at:] == new != old[at:]

    async def test_whole_answers_say_the_version_of_every_choice(self, live: Live) -> None:
        await advance(live.client, live.weights, 1)
        for path, request in {
            "/v1/completions": body(n=2, max_tokens=3, temperature=1),
            **self.own_routes,
            "/v1/chat/completions": {
                "model": "tiny",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 3,
                "ignore_eos": True,
            },
        }.items():
            async with (
                aiohttp.ClientSession() as session,
                session.post(live.server.url + path, json=request) as response,
            ):
                answer = await response.json()
                assert response.status == 200, answer
            assert response.headers["X-Stitch-Version-Start"] == "1", path
            assert response.headers["X-Stitch-Version-End"] == "1", path
            assert (answer["weight_version_start"], answer["weight_version_end"]) == (1, 1), path
            for choice in answer.get("choices", ()):
                assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 3}], path

    async def test_requests_under_load_survive_20_commits(self, live: Live) -> None:
        """None fails, and each says versions that were there while it was answered."""
        committed, newest, stop = 0, 0, asyncio.Event()
        answered: asyncio.Queue[None] = asyncio.Queue()

        async def ask(session: aiohttp.ClientSession, number: int) -> None:
            while not stop.is_set():
                oldest = committed
                request = body(prompt=[number, 3, 4], max_tokens=16)
                url = f"{live.server.url}/v1/completions"
                async with session.post(url, json=request) as response:
                    assert response.status == 200, await response.text()
                    (choice,) = (await response.json())["choices"]
                assert len(choice["token_ids"]) == 16
                spans = choice["weight_versions"]
                assert [0, *(it["end"] for it in spans)] == [*(it["start"] for it in spans), 16]
                versions = [it["version"] for it in spans]
                assert versions == sorted(set(versions))
                assert oldest <= versions[0] <= versions[-1] <= newest
                answered.put_nowait(None)

        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
            for number in range(4):
                clients.create_task(ask(session, number))
            for version in range(1, NUM_PATCHES + 1):
                await answered.get()
                newest = version
                await advance(live.client, live.weights, version)
                committed = version
            stop.set()
        assert (await live.client.verify()).digest == digest_of(live.weights)
