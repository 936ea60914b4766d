"""The control interface over HTTP, for any object that has the port's methods.

An engine (or a plugin inside one) mounts these routes on loopback:

    app.add_subapp(wire.PREFIX, control_app(engine, schema=schema, token=token))

Operations run to their end even when the caller goes away: a commit is never left half done
because a connection broke. See docs/protocol.md for the routes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from stitch.engines import wire
from stitch.engines.parts import MAX_RECEIVED_PART_BYTES, PartsBox
from stitch.engines.port import Engine
from stitch.errors import EngineError, FatalError, RetryableError, StitchError, UsageError
from stitch.types import Schema, VersionRef

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def control_app(engine: Engine, *, schema: Schema, token: str) -> web.Application:
    """An aiohttp application to mount under `wire.PREFIX`; `token` guards every route."""
    if len(token) < 16:
        raise UsageError("the control token needs at least 16 characters")
    routes = _Routes(engine, schema)
    app = web.Application(middlewares=[_authorise(token), _report_errors])
    app.add_routes(
        [
            web.get("/describe", routes.describe),
            web.post("/bind", routes.bind),
            web.post("/stage", routes.open_stage),
            web.put("/stage/{stage_id}/parts/{number}", routes.put_part),
            web.post("/stage/{stage_id}/seal", routes.seal_stage),
            web.delete("/stage", routes.discard),
            web.post("/commit", routes.commit),
            web.post("/roll_back", routes.roll_back),
            web.post("/verify", routes.verify),
        ]
    )
    return app


def _authorise(token: str) -> Middleware:
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        got = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(got, wanted):
            body = {"error": {"type": "Unauthorized", "message": "wrong or missing control token"}}
            return web.json_response(body, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return authorise


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except StitchError as error:
        _log.warning("event=control_refused path=%s error=%s", request.path, error)
        return web.json_response(wire.error_to_json(error), status=_status_of(error))
    except web.HTTPException as error:
        body = {"error": {"type": "UsageError", "message": error.reason}}
        return web.json_response(body, status=error.status)


def _status_of(error: StitchError) -> int:
    if isinstance(error, UsageError):
        return 400
    if isinstance(error, RetryableError):
        return 409
    assert isinstance(error, FatalError)
    return 500


class _OpenStage:
    """A stage whose parts are arriving."""

    def __init__(self, stage_id: str, base: VersionRef, target: VersionRef, schema: Schema) -> None:
        self.stage_id = stage_id
        self.base = base
        self.target = target
        self.parts = PartsBox(schema)


class _Routes:
    def __init__(self, engine: Engine, schema: Schema) -> None:
        self._engine = engine
        self._schema = schema
        self._open: _OpenStage | None = None
        self._order = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def describe(self, request: web.Request) -> web.Response:
        return web.json_response(wire.description_to_json(await self._engine.describe()))

    async def bind(self, request: web.Request) -> web.Response:
        body = await _body(request)
        ref = wire.ref_from_json({k: body.get(k) for k in ("run", "version")}, "bind")
        digest = wire.text_field(body, "digest")
        self._open = None
        await self._to_the_end(self._engine.bind(ref, digest))
        return _done()

    async def open_stage(self, request: web.Request) -> web.Response:
        body = await _body(request)
        self._open = _OpenStage(
            wire.text_field(body, "stage_id"),
            wire.ref_from_json(body.get("base"), "base"),
            wire.ref_from_json(body.get("target"), "target"),
            self._schema,
        )
        return _done()

    async def put_part(self, request: web.Request) -> web.Response:
        self._opened(request)
        number = request.match_info["number"]
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise UsageError(f"part number {number!r:.40} is not a number")
        data = await _read_part(request)
        self._opened(request).parts.put(int(number), data)
        return _done()

    async def seal_stage(self, request: web.Request) -> web.Response:
        stage = self._opened(request)
        body = await _body(request)
        num_parts, num_changed = (
            wire.count_field(body, "num_parts"),
            wire.count_field(body, "num_changed"),
        )
        await self._to_the_end(self._seal(stage, num_parts, num_changed))
        return _done()

    async def _seal(self, stage: _OpenStage, num_parts: int, num_changed: int) -> None:
        update = await asyncio.to_thread(stage.parts.seal, num_parts, num_changed)
        await self._engine.stage(stage.stage_id, stage.base, stage.target, update)
        if self._open is stage:
            self._open = None

    async def discard(self, request: web.Request) -> web.Response:
        self._open = None
        await self._to_the_end(self._engine.discard())
        return _done()

    async def commit(self, request: web.Request) -> web.Response:
        body = await _body(request)
        receipt = await self._to_the_end(self._engine.commit(wire.text_field(body, "stage_id")))
        return web.json_response(wire.receipt_to_json(receipt))

    async def roll_back(self, request: web.Request) -> web.Response:
        to = wire.ref_from_json(await _body(request), "roll_back")
        await self._to_the_end(self._engine.roll_back(to))
        return _done()

    async def verify(self, request: web.Request) -> web.Response:
        report = await self._to_the_end(self._engine.verify())
        return web.json_response(wire.report_to_json(report))

    def _opened(self, request: web.Request) -> _OpenStage:
        stage_id = request.match_info["stage_id"]
        if self._open is None or self._open.stage_id != stage_id:
            raise EngineError(
                f"stage {stage_id!r:.200} is not open: it was replaced, dropped or never begun"
            )
        return self._open

    async def _to_the_end(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` alone, to its end even if the caller's connection breaks."""
        task = asyncio.create_task(self._alone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_mark_seen)
        return await asyncio.shield(task)

    async def _alone(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async with self._order:
            return await work


def _mark_seen(task: asyncio.Task[Any]) -> None:
    """Fetch the outcome, so that an error whose caller left is not reported as never retrieved."""
    if not task.cancelled():
        task.exception()


async def _read_part(request: web.Request) -> bytes:
    """The body, up to our own limit: the application's is meant for ordinary requests."""
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_RECEIVED_PART_BYTES:
            raise UsageError(f"a part may have at most {MAX_RECEIVED_PART_BYTES} bytes")
    return bytes(data)


async def _body(request: web.Request) -> dict[str, Any]:
    return wire.object_from(await request.read(), request.path)


def _done() -> web.Response:
    return web.json_response({"ok": True})
