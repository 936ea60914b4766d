"""The HTTP face: OpenAI-like completions, plain or streamed, stamped with weight versions."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from stitch.engines import stamps, wire
from stitch.engines.control_routes import control_app
from stitch.engines.embedded.answers import Answer, Choice
from stitch.engines.embedded.body import (
    Ask,
    BadRequestError,
    parse_ask,
    parse_messages,
    parse_prompts,
)
from stitch.engines.embedded.engine import EmbeddedEngine
from stitch.engines.embedded.generation import Event, Failed, Generation
from stitch.engines.embedded.loop import DecodeLoop, QueueFullError
from stitch.engines.embedded.model import LoadedModel
from stitch.engines.embedded.sampling import Sampler, choice_seed
from stitch.engines.embedded.text import TextStream
from stitch.engines.embedded.vocabulary import Vocabulary
from stitch.errors import EngineError, UsageError

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 32 * 2**20

Events = asyncio.Queue[tuple[int, Event]]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits of the server. `max_len` counts prompt and output tokens of one choice."""

    model_name: str
    max_slots: int = 16
    max_len: int = 512
    max_queue: int = 256
    threads: int = 1


def build_app(loaded: LoadedModel, options: ServerOptions, *, token: str) -> web.Application:
    """The application; its decode thread runs from start-up to clean-up of the app.

    Run it with `handler_cancellation=True`, or clients that leave do not abort generation.
    """
    aio: list[asyncio.AbstractEventLoop] = []

    def deliver(batch: list[tuple[Generation, Event]]) -> None:
        if batch and not aio[0].is_closed():
            aio[0].call_soon_threadsafe(_pass_on, batch)

    loop = DecodeLoop(
        loaded,
        max_slots=options.max_slots,
        max_len=options.max_len,
        max_queue=options.max_queue,
        deliver=deliver,
    )
    engine = EmbeddedEngine(loop, loaded.weights, threads=options.threads)
    server = _Server(loaded, loop, options)
    app = web.Application(middlewares=[_report_errors], client_max_size=_MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/v1/models", server.models),
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.chat),
        ]
    )
    app.add_subapp(wire.PREFIX, control_app(engine, schema=loaded.weights.schema, token=token))

    async def start(_: web.Application) -> None:
        aio.append(asyncio.get_running_loop())
        loop.start()

    async def stop(_: web.Application) -> None:
        await asyncio.to_thread(loop.stop)

    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    return app


def _pass_on(batch: list[tuple[Generation, Event]]) -> None:
    for generation, event in batch:
        generation.sink(event)


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's shape."""
    if request.path.startswith(wire.PREFIX):
        return await handler(request)
    try:
        return await handler(request)
    except QueueFullError as error:
        return _error(503, str(error), "overloaded", headers={"Retry-After": "1"})
    except BadRequestError as error:
        return _error(400, str(error), "invalid_request_error", error.param)
    except UsageError as error:
        return _error(400, str(error), "invalid_request_error")
    except EngineError as error:
        return _error(500, str(error), "internal_error")
    except web.HTTPException as error:
        return _error(error.status, error.reason, "invalid_request_error")


def _error(
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    return web.json_response(
        _error_json(status, message, kind, param), status=status, headers=headers
    )


def _error_json(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _Server:
    def __init__(self, loaded: LoadedModel, loop: DecodeLoop, options: ServerOptions) -> None:
        self._loaded = loaded
        self._loop = loop
        self._options = options
        self._vocabulary = Vocabulary(loaded.tokenizer)
        # Used by the decode thread only.
        self._decoder = Vocabulary(loaded.decoder)

    async def health(self, request: web.Request) -> web.Response:
        body = {
            "status": "ok" if self._loop.alive else "failed",
            "running": self._loop.num_running,
            "waiting": self._loop.num_waiting,
        }
        return web.json_response(body, status=200 if self._loop.alive else 503)

    async def models(self, request: web.Request) -> web.Response:
        row = {
            "id": self._options.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "stitch",
            "max_model_len": self._options.max_len,
        }
        return web.json_response({"object": "list", "data": [row]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = wire.object_from(await request.read(), "the body")
        ask = parse_ask(body, chat=False)
        prompts = [
            self._vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in parse_prompts(body)
        ]
        return await self._answer(request, body, ask, prompts, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = wire.object_from(await request.read(), "the body")
        ask = parse_ask(body, chat=True)
        prompts = [self._vocabulary.encode_chat(parse_messages(body))]
        return await self._answer(request, body, ask, prompts, chat=True)

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        ask: Ask,
        prompts: list[list[int]],
        *,
        chat: bool,
    ) -> web.StreamResponse:
        self._check_model(body)
        for at, prompt in enumerate(prompts):
            self._check_prompt(prompt, ask, f" {at}" if len(prompts) > 1 else "")
        num_choices = len(prompts) * ask.n
        if num_choices > self._options.max_queue + self._options.max_slots:
            raise BadRequestError(f"{num_choices} choices are more than this server ever queues")
        events: Events = asyncio.Queue()
        choices, generations = self._generations(ask, prompts, events)
        answer = Answer(
            chat=chat,
            model=self._options.model_name,
            vocabulary=self._vocabulary,
            wants_logprobs=ask.num_logprobs is not None,
            wants_token_ids=ask.return_token_ids,
        )
        num_prompt_tokens = sum(map(len, prompts))
        self._loop.submit(generations)
        try:
            if ask.stream:
                stream = _Stream(request, answer, choices, events)
                return await stream.run(num_prompt_tokens if ask.include_usage else None)
            await _collect(choices, events)
        finally:
            # Also when the client left or another choice failed; no-op for finished ones.
            self._loop.abort(generations)
        versions = [choice.versions for choice in choices]
        return web.json_response(
            answer.whole(choices, num_prompt_tokens), headers=stamps.headers(versions)
        )

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise BadRequestError(f"model must be a text, got {name!r:.100}", "model")
        if name is not None and name != self._options.model_name:
            raise web.HTTPNotFound(
                reason=f"model {name[:200]!r} is not served; this is {self._options.model_name!r}"
            )

    def _check_prompt(self, prompt: list[int], ask: Ask, number: str) -> None:
        vocab_size, max_len = self._loaded.geometry.vocab_size, self._options.max_len
        if not prompt:
            raise BadRequestError(f"prompt{number} has no tokens", "prompt")
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise BadRequestError(
                f"prompt{number} has token id {wrong}, the vocabulary has {vocab_size}", "prompt"
            )
        if len(prompt) + (ask.max_tokens or 1) > max_len:
            raise BadRequestError(
                f"prompt{number} of {len(prompt)} tokens and max_tokens={ask.max_tokens or 1} do "
                f"not fit into {max_len} tokens",
                "max_tokens" if len(prompt) < max_len else "prompt",
            )
        wrong = next((token for token in ask.stop_token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise BadRequestError(f"stop_token_ids has {wrong}", "stop_token_ids")

    def _generations(
        self, ask: Ask, prompts: Sequence[list[int]], events: Events
    ) -> tuple[list[Choice], list[Generation]]:
        choices: list[Choice] = []
        generations: list[Generation] = []
        for prompt in prompts:
            params = ask.params(ask.max_tokens or self._options.max_len - len(prompt))
            for which in range(ask.n):
                index = len(choices)
                choices.append(Choice(index=index, prompt=prompt))
                generations.append(
                    Generation(
                        prompt=prompt,
                        params=params,
                        sampler=Sampler(params, choice_seed(ask.seed, which), self._loaded.device),
                        text=TextStream(self._decoder.decode, params.stop),
                        eos_ids=self._loaded.eos_ids,
                        sink=_sink(events, index),
                    )
                )
        return choices, generations


def _sink(events: Events, index: int) -> Callable[[Event], None]:
    return lambda event: events.put_nowait((index, event))


def _take(choices: Sequence[Choice], at: int, event: Event) -> Choice:
    """Add an event to its choice; EngineError if the choice failed."""
    if isinstance(event, Failed):
        raise EngineError(f"choice {at}: {event.message}")
    choices[at].take(event)
    return choices[at]


async def _collect(choices: Sequence[Choice], events: Events) -> None:
    left = len(choices)
    while left:
        at, event = await events.get()
        left -= _take(choices, at, event).finish is not None


class _Stream:
    """Server-sent events. Headers go out with the first token, so they tell its version."""

    def __init__(
        self, request: web.Request, answer: Answer, choices: Sequence[Choice], events: Events
    ) -> None:
        self._request = request
        self._answer = answer
        self._choices = choices
        self._events = events
        self._response: web.StreamResponse | None = None

    async def run(self, num_prompt_tokens: int | None) -> web.StreamResponse:
        """Send everything; `num_prompt_tokens` is given when usage is wanted."""
        started: set[int] = set()
        left = len(self._choices)
        while left:
            touched: dict[int, Choice] = {}
            for at, event in await self._ready():
                try:
                    choice = touched[at] = _take(self._choices, at, event)
                except EngineError as error:
                    return await self._break_off(error)
                left -= choice.finish is not None
            await self._send(list(self._chunks(touched, started)))
        return await self._end(num_prompt_tokens)

    async def _ready(self) -> list[tuple[int, Event]]:
        """At least one event, and whatever else is there already."""
        ready = [await self._events.get()]
        while not self._events.empty():
            ready.append(self._events.get_nowait())
        return ready

    def _chunks(self, touched: dict[int, Choice], started: set[int]) -> Iterator[dict[str, Any]]:
        """A chunk of each choice that has new tokens, also where they released no text yet."""
        for at, choice in touched.items():
            yield self._answer.chunk(choice, first=at not in started)
            started.add(at)

    async def _send(self, events: Sequence[dict[str, Any] | str]) -> None:
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        response = await self._opened()
        await response.write("".join(f"data: {line}\n\n" for line in lines).encode())

    async def _opened(self) -> web.StreamResponse:
        if self._response is None:
            start, _ = stamps.bounds_of([choice.versions[:1] for choice in self._choices])
            headers = {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
            if start is not None:
                headers[stamps.START_HEADER] = str(start)
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response

    async def _end(self, num_prompt_tokens: int | None) -> web.StreamResponse:
        events: list[dict[str, Any] | str] = []
        if num_prompt_tokens is not None:
            events.append(self._answer.usage_chunk(self._choices, num_prompt_tokens))
        events.append(stamps.stream_event([choice.versions for choice in self._choices]))
        await self._send([*events, "[DONE]"])
        response = await self._opened()
        await response.write_eof()
        return response

    async def _break_off(self, error: EngineError) -> web.StreamResponse:
        """After an error: a plain 500 if nothing was sent, else an error event and no [DONE]."""
        if self._response is None:
            raise error
        await self._send([_error_json(500, str(error), "internal_error")])
        await self._response.write_eof()
        return self._response
