"""Version stamps on vLLM's answers, from the spans that it keeps with a choice's last output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.engines.vllm.stamping import Stamping, noting


@dataclass
class Span:
    """As vLLM has them: labels are texts."""

    version: str
    start: int
    end: int


def output(index: int, *spans: tuple[str, int, int]) -> Any:
    """One choice's output; without spans it is not the last."""
    found = [Span(*span) for span in spans] or None
    return SimpleNamespace(outputs=[SimpleNamespace(index=index, weight_versions=found)])


class Engine:
    """Yields what was prepared for each prompt."""

    def __init__(self, *by_prompt: list[Any]) -> None:
        self._left = list(by_prompt)
        self.closed = 0

    def __call__(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        return self._outputs(self._left.pop(0))

    async def _outputs(self, found: list[Any]) -> AsyncIterator[Any]:
        try:
            for one in found:
                await asyncio.sleep(0)
                yield one
        finally:
            self.closed += 1


def application(engine: Engine, num_prompts: int, n: int, parts: list[bytes], kind: bytes) -> Any:
    """A server that asks the engine for all prompts, reads the outputs side by side and answers."""
    generate = noting(engine)

    async def read(outputs: AsyncIterator[Any]) -> None:
        async for _ in outputs:
            pass

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        params = SimpleNamespace(n=n)
        asked = [generate("p", params, f"id-{number}") for number in range(num_prompts)]
        await asyncio.gather(*map(read, reversed(asked)))
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        )
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return Stamping(answer)


async def ask(app: Any, path: str = "/v1/completions") -> tuple[dict[str, str], bytes]:
    headers: dict[str, str] = {}
    body = bytearray()

    async def send(message: Any) -> None:
        for name, value in message.get("headers", ()):
            headers[name.decode().lower()] = value.decode()
        body.extend(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    await app(scope, None, send)
    return headers, bytes(body)


def whole(num_choices: int) -> list[bytes]:
    data = json.dumps({"id": "x", "choices": [{"index": i} for i in range(num_choices)]}).encode()
    return [data[:9], data[9:]]


async def test_a_whole_answer_says_which_tokens_came_from_which_version() -> None:
    engine = Engine([output(0), output(0, ("3", 0, 2), ("4", 2, 5))])
    headers, body = await ask(application(engine, 1, 1, whole(1), b"application/json"))
    answer = json.loads(body)
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (3, 4)
    (choice,) = answer["choices"]
    assert choice["weight_versions"] == [
        {"version": 3, "start": 0, "end": 2},
        {"version": 4, "start": 2, "end": 5},
    ]
    assert headers["x-stitch-version-start"] == "3"
    assert headers["x-stitch-version-end"] == "4"
    assert headers["content-length"] == str(len(body))
    assert engine.closed == 1


async def test_choices_of_several_prompts_keep_their_order() -> None:
    engine = Engine(
        [output(1, ("1", 0, 2)), output(0, ("1", 0, 1))],
        [output(0, ("2", 0, 3)), output(1, ("2", 0, 4))],
    )
    _, body = await ask(application(engine, 2, 2, whole(4), b"application/json"))
    spans = [choice["weight_versions"] for choice in json.loads(body)["choices"]]
    assert [(span["version"], span["end"]) for (span,) in spans] == [(1, 1), (1, 2), (2, 3), (2, 4)]


async def test_a_stream_carries_one_event_before_its_end() -> None:
    engine = Engine([output(0), output(0, ("7", 0, 3))])
    parts = [b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"]
    _, body = await ask(application(engine, 1, 1, parts, b"text/event-stream; charset=utf-8"))
    first, stamp, done, _ = body.split(b"\n\n")
    assert (first, done) == (b'data: {"choices": []}', b"data: [DONE]")
    event = json.loads(stamp.removeprefix(b"data: "))
    assert event["object"] == "stitch.versions"
    assert event["weight_versions"] == [[{"version": 7, "start": 0, "end": 3}]]


async def test_labels_that_are_not_ours_are_no_versions() -> None:
    engine = Engine([output(0, ("default", 0, 3))])
    headers, body = await ask(application(engine, 1, 1, whole(1), b"application/json"))
    answer = json.loads(body)
    assert answer["weight_version_start"] is None
    assert answer["choices"][0]["weight_versions"] == []
    assert "x-stitch-version-start" not in headers


@pytest.mark.parametrize(
    ("outputs", "path"),
    [([output(0)], "/v1/completions"), ([output(0, ("1", 0, 1))], "/v1/embeddings")],
    ids=["no spans", "another route"],
)
async def test_what_is_not_known_is_left_to_the_replica(outputs: list[Any], path: str) -> None:
    app = application(Engine(outputs), 1, 1, whole(1), b"application/json")
    headers, body = await ask(app, path)
    assert body == b"".join(whole(1))
    assert "x-stitch-version-start" not in headers


async def test_requests_at_the_same_time_do_not_mix() -> None:
    apps = [
        application(Engine([output(0, (str(n), 0, n))]), 1, 1, whole(1), b"application/json")
        for n in range(1, 9)
    ]
    for n, (_, body) in enumerate(await asyncio.gather(*map(ask, apps)), 1):
        assert json.loads(body)["weight_version_start"] == n
