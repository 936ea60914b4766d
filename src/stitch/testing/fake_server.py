"""HTTP face of the FakeEngine: OpenAI-like routes, plain or streamed, and the control interface.

Serve it with `handler_cancellation=True` (aiohttp's AppRunner and TestServer take it), or a client
that goes away does not abort its generation.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from stitch.engines import stamps, wire
from stitch.engines.control_routes import control_app
from stitch.errors import EngineUnreachableError, UsageError
from stitch.testing.fake_engine import FakeEngine, FakeToken


def build(engine: FakeEngine, token: str) -> web.Application:
    server = _Server(engine)
    app = web.Application(middlewares=[server.break_off_when_dead])
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/v1/models", server.models),
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.chat),
            # What must never be reachable through a replica.
            web.post("/update_weights", server.lifecycle),
            web.post("/pause", server.lifecycle),
            web.route("*", "/admin/{rest:.*}", server.lifecycle),
            web.route("*", "/echo", server.echo),
        ]
    )
    app.add_subapp(wire.PREFIX, control_app(engine, schema=engine.weights.schema, token=token))

    async def release(_: web.Application) -> None:
        engine.faults.release.set()

    app.on_shutdown.append(release)
    return app


class _Server:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    @web.middleware
    async def break_off_when_dead(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        if not self._engine.dead:
            try:
                response = await handler(request)
            except EngineUnreachableError:
                response = None
            except UsageError as error:
                response = _refuse(str(error))
        if response is None or self._engine.dead:
            if request.transport is not None:
                request.transport.abort()
            return response or web.Response(status=500)
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        row = {"id": self._engine.model, "object": "model", "created": 0, "owned_by": "stitch"}
        return web.json_response({"object": "list", "data": [row]})

    async def lifecycle(self, request: web.Request) -> web.Response:
        return web.json_response({"reached": request.path})

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = [[key, value] for key, value in request.headers.items()]
        return web.json_response(
            {"method": request.method, "headers": headers, "body": body.decode("latin-1")}
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            return _refuse("prompt must be a string")
        return await self._answer(request, body, prompt, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        if not isinstance(body.get("messages"), list):
            return _refuse("messages must be a list")
        prompt = "\n".join(str(m.get("content")) for m in body["messages"])
        return await self._answer(request, body, prompt, chat=True)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, *, chat: bool
    ) -> web.StreamResponse:
        engine = self._engine
        engine.requests.append({"body": body, "headers": dict(request.headers)})
        salt = str(body.get(engine.salt_field, "")) if engine.salt_field else ""
        tokens = engine.generate(prompt, int(body.get("max_tokens", 16)), salt)
        try:
            if body.get("stream"):
                return await self._stream(request, tokens, chat=chat)
            return self._plain([token async for token in tokens], body, chat=chat)
        finally:
            await tokens.aclose()

    def _plain(
        self, tokens: list[FakeToken], body: dict[str, Any], *, chat: bool
    ) -> web.StreamResponse:
        text = "".join(token.text for token in tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [token.token_id for token in tokens]
        versions = [token.version for token in tokens]
        answer: dict[str, Any] = {**self._head(chat), "choices": [choice]}
        answer["usage"] = {
            "completion_tokens": len(tokens),
            "prompt_tokens_details": {"cached_tokens": int(any(t.cached for t in tokens))},
        }
        if self._engine.stamps_versions:
            choice["weight_versions"] = stamps.spans_json(versions)
            answer |= stamps.stamp_json([versions])
        stamped = stamps.headers([versions]) if self._engine.stamps_versions else {}
        return web.json_response(answer, headers=stamped)

    async def _stream(
        self, request: web.Request, tokens: AsyncGenerator[FakeToken, None], *, chat: bool
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        versions: list[int | None] = []
        async for token in tokens:
            if response is None:
                response = await self._begin(request, token.version)
            versions.append(token.version)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": token.text}} if chat else {"text": token.text}
            await self._event(response, {**self._head(chat), "choices": [choice]}, len(versions))
        if response is None:
            response = await self._begin(request, None)
        last: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        last["delta" if chat else "text"] = {} if chat else ""
        await self._event(response, {**self._head(chat), "choices": [last]}, 0)
        if self._engine.stamps_versions:
            await self._event(response, stamps.stream_event([versions]), 0)
        await self._event(response, "[DONE]", 0)
        await response.write_eof()
        return response

    async def _begin(self, request: web.Request, version: int | None) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        if self._engine.stamps_versions and version is not None:
            headers[stamps.START_HEADER] = str(version)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        return response

    async def _event(
        self, response: web.StreamResponse, event: dict[str, Any] | str, number: int
    ) -> None:
        data = event if isinstance(event, str) else json.dumps(event)
        framing = self._engine.faults.sse
        text = f"data: {data}\n\n"
        if framing == "crlf":
            text = f"data: {data}\r\n\r\n"
        elif framing == "events":
            text = f": keep-alive\nid: {number}\nevent: message\ndata: {data}\n\n"
        raw = text.encode()
        for piece in [raw] if framing != "bytes" else [raw[i : i + 1] for i in range(len(raw))]:
            await response.write(piece)

    def _head(self, chat: bool) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        created = int(time.time())
        return {"id": "fake-1", "object": kind, "created": created, "model": self._engine.model}


async def _json_object(request: web.Request) -> dict[str, Any]:
    return wire.object_from(await request.read(), request.path)


def _refuse(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=400)
