"""What a patched engine answers is what a fresh one answers that loaded the same version.

The test modules bind `OnEngine` and `OnOneEngine` to an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
from real_kit import PROMPTS, RealEngine, digest_of
from real_models import load, make_model, real_change, save

from stitch.engines.control import ControlClient
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import NUM_TOKENS
from stitch.types import VersionRef

NUM_PATCHES = 20
LONG_PROMPT = [7 * i % 250 for i in range(300)]
"""More than two blocks of vLLM's prefix cache on CPUs, which are 128 tokens each."""


def answers(server: RealEngine) -> list[list[int]]:
    return [server.tokens(prompt) for prompt in (*PROMPTS, LONG_PROMPT)]


def at(version: int) -> VersionRef:
    return VersionRef("equality", version)


async def advance(client: ControlClient, weights: HostWeights, version: int) -> None:
    """Commit a large change that leads to `version`."""
    update = real_change(weights, seed=version)
    await client.stage(f"to-{version}", at(version - 1), at(version), update)
    await client.commit(f"to-{version}")
    update.apply(weights)


@dataclass
class Live:
    server: RealEngine
    client: ControlClient
    weights: HostWeights


class OnEngine:
    engine: ClassVar[type[RealEngine]]

    @pytest.mark.parametrize(("kind", "tp"), [("tied", 1), ("untied", 2), ("moe", 1), ("moe", 2)])
    async def test_tokens_equal_those_of_a_fresh_engine_after_1_and_20_patches(
        self, kind: str, tp: int, tmp_path: Path
    ) -> None:
        model = make_model(kind, tmp_path / "model")
        weights, base = load(model), load(model)
        server = self.engine(model, tmp_path / "log", tp=tp)
        found, checkpoints = {0: answers(server)}, {}
        try:
            client = server.client()
            await client.bind(at(0), digest_of(weights))
            for version in range(1, NUM_PATCHES + 1):
                await advance(client, weights, version)
                if version in (1, NUM_PATCHES):
                    assert (await client.verify()).digest == digest_of(weights)
                    found[version] = answers(server)
                    checkpoints[version] = save(weights, model, tmp_path / f"v{version}")
            await client.close()
        finally:
            server.stop()
        assert found[0] != found[1] != found[NUM_PATCHES]
        assert digest_of(base) != digest_of(weights)
        for version, checkpoint in checkpoints.items():
            fresh = self.engine(checkpoint, tmp_path / f"log-{version}", tp=tp)
            try:
                assert answers(fresh) == found[version], f"version {version}"
            finally:
                fresh.stop()


class OnOneEngine:
    engine: ClassVar[type[RealEngine]]

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

    async def test_a_stream_that_spans_a_commit_finishes(self, live: Live) -> None:
        update = real_change(live.weights, seed=1)
        await live.client.stage("to-1", at(0), at(1), update)
        body = {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        committed_after = 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{live.server.url}/v1/completions", json=body) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice["token_ids"] or []
                if tokens and not committed_after:
                    await live.client.commit("to-1")
                    committed_after = len(tokens)
        update.apply(live.weights)
        assert len(tokens) == NUM_TOKENS
        assert 0 < committed_after < NUM_TOKENS
        before = live.server.tokens([5, 6, 7], NUM_TOKENS)
        assert tokens != before  # its first tokens are the old version's

    async def test_requests_under_load_survive_20_commits(self, live: Live) -> None:
        stop = asyncio.Event()
        done: list[int] = []

        async def ask(number: int) -> None:
            while not stop.is_set():
                tokens = await asyncio.to_thread(live.server.tokens, [number, 3, 4], 16)
                done.append(len(tokens))

        clients = [asyncio.create_task(ask(number)) for number in range(4)]
        for version in range(1, NUM_PATCHES + 1):
            await advance(live.client, live.weights, version)
        stop.set()
        await asyncio.gather(*clients)
        assert set(done) == {16}
        assert (await live.client.verify()).digest == digest_of(live.weights)
