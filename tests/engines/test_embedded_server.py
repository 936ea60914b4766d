"""The embedded engine's OpenAI-like routes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_kit import Served, embedded_app, until

GREEDY = {"prompt": "1+2=", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Api:
    """Requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        status, body = await self.post("/v1/completions", GREEDY | fields)
        assert status == 200, body
        return body

    async def chat(self, **fields: Any) -> dict[str, Any]:
        message = {"messages": [{"role": "user", "content": "1+2"}], "max_tokens": 8}
        status, body = await self.post("/v1/chat/completions", message | fields)
        assert status == 200, body
        return body

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.session.post(f"{self.url}{path}", json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        return [json.loads(line[6:]) for line in lines[:-1]]

    async def health(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/health") as response:
            assert response.status == 200
            return await response.json()

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the health report meets a condition."""

        async def met() -> bool:
            return condition(await self.health())

        await until(met)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


async def serve(app: Any) -> AsyncIterator[Api]:
    async with Served(app) as url, aiohttp.ClientSession() as session:
        yield Api(session, url)


@pytest.fixture
async def api(tiny: Path) -> AsyncIterator[Api]:
    async for it in serve(embedded_app(tiny)):
        yield it


@pytest.fixture
async def narrow(tiny: Path) -> AsyncIterator[Api]:
    """One slot, a queue of one, and steps that take a while."""
    async for it in serve(embedded_app(tiny, paced=True, max_slots=1, max_queue=1)):
        yield it


async def test_a_completion_has_openais_shape(api: Api) -> None:
    body = await api.complete()
    assert body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert "token_ids" not in choice


async def test_prompts_as_text_and_as_ids_are_the_same(api: Api) -> None:
    by_text = await api.complete(return_token_ids=True)
    by_ids = await api.complete(prompt=list(b"1+2="), return_token_ids=True)
    assert by_text["choices"] == by_ids["choices"]
    (choice,) = by_ids["choices"]
    assert choice["prompt_token_ids"] == list(b"1+2=")
    assert len(choice["token_ids"]) == 12


async def test_several_prompts_give_choices_in_their_order(api: Api) -> None:
    body = await api.complete(prompt=["1+2=", "7*8="], n=2, seed=4, temperature=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 8
    for at, prompt in enumerate(("1+2=", "7*8=")):
        alone = await api.complete(prompt=prompt, n=2, seed=4, temperature=1)
        texts = [choice["text"] for choice in body["choices"][2 * at : 2 * at + 2]]
        assert texts == [choice["text"] for choice in alone["choices"]]
        assert texts[0] != texts[1]


async def test_a_seed_gives_the_same_answer_while_others_are_served(api: Api) -> None:
    alone = await api.complete(temperature=1, seed=11, return_token_ids=True)
    among = await asyncio.gather(
        *(
            api.complete(temperature=1, seed=seed, return_token_ids=True, prompt=f"{seed}*3=")
            for seed in range(5)
        ),
        api.complete(temperature=1, seed=11, return_token_ids=True),
    )
    assert among[-1]["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


async def test_completion_logprobs_have_openais_four_lists(api: Api) -> None:
    (choice,) = (await api.complete(logprobs=2))["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(column) for column in logprobs.values()} == {12}
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    # Greedy: the chosen token is the likeliest.
    best = [max(top.values()) for top in logprobs["top_logprobs"]]
    assert best == pytest.approx(logprobs["token_logprobs"])


async def test_zero_logprobs_are_those_of_the_chosen_tokens_alone(api: Api) -> None:
    (choice,) = (await api.complete(logprobs=0))["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 12
    assert choice["logprobs"]["top_logprobs"] == [{}] * 12


async def test_a_chat_completion_has_openais_shape(api: Api) -> None:
    body = await api.chat(logprobs=True, top_logprobs=2, return_token_ids=True, seed=1)
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert bytes(body["prompt_token_ids"]) == b"user: 1+2\nassistant: "


async def test_a_chat_goes_on_to_the_end_of_the_context_by_default(api: Api) -> None:
    body = await api.chat(max_tokens=None, ignore_eos=True, temperature=0)
    assert body["usage"]["total_tokens"] == 512


async def test_a_stream_adds_up_to_the_plain_answer(api: Api) -> None:
    fields = {"n": 2, "seed": 5, "temperature": 1, "return_token_ids": True, "logprobs": 1}
    plain = await api.complete(**fields)
    events = await api.stream("/v1/completions", GREEDY | fields)
    chunks = [event["choices"][0] for event in events if event["object"] == "text_completion"]
    for choice in plain["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert joined(chunk["token_ids"] for chunk in mine) == choice["token_ids"]
        tokens = joined(chunk["logprobs"]["tokens"] for chunk in mine)
        assert tokens == choice["logprobs"]["tokens"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        reasons = [chunk["finish_reason"] for chunk in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
    assert events[-1]["object"] == "stitch.versions"


async def test_a_streamed_chat_names_the_role_first_and_usage_last(api: Api) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "seed": 2,
        "stream_options": {"include_usage": True},
    }
    events = await api.stream("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(event["choices"][0]["delta"]["content"] for event in events[:-2])
    plain = await api.chat(**body | {"stream_options": None})
    assert text == plain["choices"][0]["message"]["content"]
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == plain["usage"]


async def test_a_stop_string_ends_the_text_before_it(api: Api) -> None:
    fields = {"prompt": "abc", "temperature": 1, "seed": 3, "max_tokens": 60}
    free = (await api.complete(**fields))["choices"][0]["text"]
    stop = next(letter for letter in free[3:] if letter.isascii())
    for stops in (stop, ["never", stop]):
        (choice,) = (await api.complete(**fields, stop=stops))["choices"]
        assert choice["text"] == free[: free.index(stop)]
        assert choice["finish_reason"] == "stop"
    events = await api.stream("/v1/completions", GREEDY | fields | {"stop": stop})
    chunks = [event["choices"][0] for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == free[: free.index(stop)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"max_tokens": 509}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"prompt": ["a"] * 100, "n": 100}, None),
    ],
)
async def test_a_bad_request_is_refused_and_harms_no_other(
    api: Api, fields: dict[str, Any], param: str | None
) -> None:
    good = asyncio.create_task(api.complete(max_tokens=100, return_token_ids=True))
    status, body = await api.post("/v1/completions", GREEDY | fields)
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param)
    assert len((await good)["choices"][0]["token_ids"]) == 100


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
async def test_a_body_that_is_no_json_object_is_refused(api: Api, raw: bytes) -> None:
    async with api.session.post(f"{api.url}/v1/completions", data=raw) as response:
        assert response.status == 400
        assert "error" in await response.json()


async def test_a_chat_that_the_template_cannot_take_is_refused(api: Api) -> None:
    status, body = await api.post("/v1/chat/completions", {"messages": [{"role": "user"}]})
    assert status == 400
    assert "content" in body["error"]["message"]


async def test_an_unknown_model_and_an_unknown_route_are_not_found(api: Api) -> None:
    status, body = await api.post("/v1/completions", GREEDY | {"model": "other"})
    assert (status, "tiny" in body["error"]["message"]) == (404, True)
    assert (await api.post("/v1/embeddings", {}))[0] == 404


async def test_the_model_is_listed(api: Api) -> None:
    async with api.session.get(f"{api.url}/v1/models") as response:
        (row,) = (await response.json())["data"]
    assert (row["id"], row["max_model_len"]) == ("tiny", 512)
    await api.complete(model="tiny")


async def test_a_full_queue_answers_503_with_retry_after(narrow: Api) -> None:
    waiting = [asyncio.create_task(narrow.complete(max_tokens=400)) for _ in range(2)]
    await narrow.until(lambda health: (health["running"], health["waiting"]) == (1, 1))
    async with narrow.session.post(f"{narrow.url}/v1/completions", json=GREEDY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["type"] == "overloaded"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(narrow: Api, stream: bool) -> None:
    body = GREEDY | {"max_tokens": 500, "stream": stream}
    task = asyncio.create_task(narrow.post("/v1/completions", body))
    await narrow.until(lambda health: health["running"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await narrow.until(lambda health: health["running"] == 0)
    assert (await narrow.complete(max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_a_client_that_leaves_the_queue_is_forgotten(narrow: Api) -> None:
    running = asyncio.create_task(narrow.complete(max_tokens=400))
    await narrow.until(lambda health: health["running"] == 1)
    queued = asyncio.create_task(narrow.complete())
    await narrow.until(lambda health: health["waiting"] == 1)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    await narrow.until(lambda health: health["waiting"] == 0)
    assert (await running)["usage"]["completion_tokens"] == 400


async def test_a_client_that_leaves_mid_stream_frees_its_slot(narrow: Api) -> None:
    body = GREEDY | {"max_tokens": 500, "stream": True}
    response = await narrow.session.post(f"{narrow.url}/v1/completions", json=body)
    assert (await response.content.readline()).startswith(b"data: ")
    response.close()
    await narrow.until(lambda health: health["running"] == 0)


async def test_the_control_routes_need_the_token(api: Api) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with api.session.get(f"{api.url}/stitch/v1/describe", headers=headers) as response:
            assert response.status == 401
