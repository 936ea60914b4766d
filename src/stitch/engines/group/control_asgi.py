"""The control interface as an ASGI application, for engines whose server is FastAPI or Starlette.

    control = ControlAsgi(token)
    app.mount(wire.PREFIX, control)
    ...
    control.serve(engine, schema)     # once the engine is ready; until then it answers 503

Same paths, same bodies, same errors as `stitch.engines.control_routes`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import unquote

from stitch.engines import wire
from stitch.engines.control_verbs import UNAUTHORISED, Body, ControlVerbs, TokenGuard, status_of
from stitch.engines.parts import MAX_RECEIVED_PART_BYTES
from stitch.engines.port import Engine
from stitch.errors import StitchError, UsageError
from stitch.types import Schema

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 2**20
"""Of everything but parts."""

_STARTING: Body = {"starting": "the engine is not ready for the control interface yet"}
_STAGE = re.compile(r"/stage/(?P<stage_id>[^/]+)/(?:parts/(?P<number>[^/]+)|seal)")
_PATHS = {
    "/describe": "GET",
    "/bind": "POST",
    "/commit": "POST",
    "/roll_back": "POST",
    "/verify": "POST",
}
"""Path -> the one method it takes; `/stage` and what is below it have their own rules."""


class _NoRouteHereError(Exception):
    """404, or 405 with the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ControlAsgi:
    """The control interface of an engine that may become ready later than its server."""

    def __init__(self, token: str) -> None:
        self._guard = TokenGuard(token)
        self._verbs: ControlVerbs | None = None

    def serve(self, engine: Engine, schema: Schema) -> None:
        """Answer for `engine` from now on."""
        self._verbs = ControlVerbs(engine, schema)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, body = await self._answer(scope, receive)
        extra = [(b"www-authenticate", b"Bearer")] if status == 401 else []
        await send_json(send, status, body, extra)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, Body]:
        if not self._guard.admits(dict(scope["headers"]).get(b"authorization", b"")):
            return 401, UNAUTHORISED
        if self._verbs is None:
            return 503, _STARTING
        path = _path_of(scope)
        try:
            return 200, await _route(self._verbs, scope["method"], path, receive)
        except StitchError as error:
            _log.warning("event=control_refused path=%s error=%s", path, error)
            return status_of(error), wire.error_to_json(error)
        except _NoRouteHereError as error:
            return error.status, {"error": {"type": "UsageError", "message": str(error)}}


async def send_json(
    send: Send, status: int, body: Body, extra: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """One whole answer, with `extra` headers."""
    data = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def _path_of(scope: Scope) -> str:
    """The path below the prefix, still quoted: a stage id may hold an escaped slash.

    What stands before the prefix (a root path) is the server's own.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    text = raw.decode("latin-1").partition("?")[0]
    return text.partition(wire.PREFIX)[2] if wire.PREFIX in text else text


async def _route(verbs: ControlVerbs, method: str, path: str, receive: Receive) -> Body:
    below = _STAGE.fullmatch(path)
    if below is not None:
        stage_id = unquote(below["stage_id"])
        if below["number"] is not None:
            _demand(method, "PUT")
            verbs.check_open(stage_id)
            data = await _read(receive, MAX_RECEIVED_PART_BYTES)
            return verbs.put_part(stage_id, below["number"], data)
        _demand(method, "POST")
        verbs.check_open(stage_id)
        return await verbs.seal_stage(stage_id, await _body(receive, path))
    if path == "/stage":
        if method == "DELETE":
            return await verbs.discard()
        _demand(method, "POST")
        return await verbs.open_stage(await _body(receive, path))
    if path not in _PATHS:
        raise _NoRouteHereError(404, "Not Found")
    _demand(method, _PATHS[path])
    match path:
        case "/describe":
            return await verbs.describe()
        case "/verify":
            return await verbs.verify(await _body(receive, path, optional=True))
        case "/bind":
            return await verbs.bind(await _body(receive, path))
        case "/commit":
            return await verbs.commit(await _body(receive, path))
        case _:
            return await verbs.roll_back(await _body(receive, path))


def _demand(method: str, wanted: str) -> None:
    if method != wanted:
        raise _NoRouteHereError(405, "Method Not Allowed")


async def _body(receive: Receive, path: str, *, optional: bool = False) -> Body:
    data = await _read(receive, MAX_BODY_BYTES)
    return wire.object_from(data or b"{}" if optional else data, path)


async def _read(receive: Receive, limit_bytes: int) -> bytes:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise UsageError("the request broke off")
        data += message.get("body", b"")
        if len(data) > limit_bytes:
            raise UsageError(f"a body may have at most {limit_bytes} bytes here")
        if not message.get("more_body"):
            return bytes(data)
