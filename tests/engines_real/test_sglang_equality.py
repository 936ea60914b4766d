"""A patched SGLang against a fresh one; requests over commits, and what they say of versions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from equality_suite import Live, OnEngine, OnOneEngine, advance
from real_kit import RealSglang

NUM_TOKENS = 300
PROMPT = [5, 6, 7]


class TestTokens(OnEngine):
    engine = RealSglang


def body(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return {**usual, "ignore_eos": True, "return_token_ids": True, **more}


async def events(live: Live, **more: Any) -> AsyncIterator[Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{live.server.url}/v1/completions", json=body(stream=True, **more)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


class TestRequests(OnOneEngine):
    engine = RealSglang

    async def test_each_token_of_a_stream_is_of_the_version_that_is_said(self, live: Live) -> None:
        old = live.server.tokens(PROMPT, NUM_TOKENS)
        choices: list[list[int]] = [[], []]
        stamp: Any = None
        committed = False
        async for event in events(live, n=2):
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
            "/v1/completions": body(n=2, max_tokens=3),
            "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}},
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


class TestOverlappedRequests(TestRequests):
    """With the scheduler that prepares a step while the one before runs, as on GPUs."""

    class engine(RealSglang):
        args = tuple(arg for arg in RealSglang.args if arg != "--disable-overlap-schedule")
