"""The control interface over HTTP, for any object that has the port's methods.

An engine built on aiohttp mounts these routes on loopback:

    app.add_subapp(wire.PREFIX, control_app(engine, schema=schema, token=token))

See docs/engines.md for the routes, and `group.control_asgi` for other web frameworks.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from stitch.engines import wire
from stitch.engines.control_verbs import UNAUTHORISED, ControlVerbs, TokenGuard, status_of
from stitch.engines.parts import MAX_RECEIVED_PART_BYTES
from stitch.engines.port import Engine
from stitch.errors import StitchError, UsageError
from stitch.types import Schema

_log = logging.getLogger(__name__)


def control_app(engine: Engine, *, schema: Schema, token: str) -> web.Application:
    """An aiohttp application to mount under `wire.PREFIX`; `token` guards every route."""
    routes = _Routes(ControlVerbs(engine, schema))
    app = web.Application(middlewares=[_authorise(TokenGuard(token)), _report_errors])
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


def _authorise(guard: TokenGuard) -> Middleware:
    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        got = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not guard.admits(got):
            headers = {"WWW-Authenticate": "Bearer"}
            return web.json_response(UNAUTHORISED, status=401, headers=headers)
        return await handler(request)

    return authorise


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except StitchError as error:
        _log.warning("event=control_refused path=%s error=%s", request.path, error)
        return web.json_response(wire.error_to_json(error), status=status_of(error))
    except web.HTTPException as error:
        body = {"error": {"type": "UsageError", "message": error.reason}}
        return web.json_response(body, status=error.status)


class _Routes:
    def __init__(self, verbs: ControlVerbs) -> None:
        self._verbs = verbs

    async def describe(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.describe())

    async def bind(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.bind(await _body(request)))

    async def open_stage(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.open_stage(await _body(request)))

    async def put_part(self, request: web.Request) -> web.Response:
        stage_id, number = request.match_info["stage_id"], request.match_info["number"]
        self._verbs.check_open(stage_id)
        return web.json_response(self._verbs.put_part(stage_id, number, await _part(request)))

    async def seal_stage(self, request: web.Request) -> web.Response:
        stage_id = request.match_info["stage_id"]
        self._verbs.check_open(stage_id)
        return web.json_response(await self._verbs.seal_stage(stage_id, await _body(request)))

    async def discard(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.discard())

    async def commit(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.commit(await _body(request)))

    async def roll_back(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.roll_back(await _body(request)))

    async def verify(self, request: web.Request) -> web.Response:
        return web.json_response(await self._verbs.verify(await _body(request, optional=True)))


async def _part(request: web.Request) -> bytes:
    """The body, up to our own limit: the application's is meant for ordinary requests."""
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_RECEIVED_PART_BYTES:
            raise UsageError(f"a part may have at most {MAX_RECEIVED_PART_BYTES} bytes")
    return bytes(data)


async def _body(request: web.Request, *, optional: bool = False) -> dict[str, Any]:
    data = await request.read()
    return wire.object_from(data or b"{}" if optional else data, request.path)
