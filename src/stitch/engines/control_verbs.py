"""What the control interface does, whichever web framework carries it.

`ControlVerbs` takes bodies and gives JSON objects; `control_routes` (aiohttp) and
`group.control_asgi` (any ASGI host) turn requests into calls of it. Operations run to their end
even when the caller goes away: a commit is never left half done because a connection broke. See
docs/engines.md.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from stitch.engines import wire
from stitch.engines.parts import PartsBox
from stitch.engines.port import Engine
from stitch.engines.turns import Turns
from stitch.errors import EngineError, FatalError, RetryableError, StitchError, UsageError
from stitch.types import Schema, VersionRef

Body = dict[str, Any]

MIN_TOKEN_CHARS = 16
UNAUTHORISED: Body = {
    "error": {"type": "Unauthorized", "message": "wrong or missing control token"}
}
DONE: Body = {"ok": True}


class TokenGuard:
    """Compares `Authorization` headers with a bearer token, in constant time."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise UsageError(f"the control token needs at least {MIN_TOKEN_CHARS} characters")
        self._wanted = f"Bearer {token}".encode()

    def admits(self, header: bytes) -> bool:
        return hmac.compare_digest(header, self._wanted)


def status_of(error: StitchError) -> int:
    """400: the call must change; 409: the engine still serves its old version; 500: fatal."""
    if isinstance(error, UsageError):
        return 400
    if isinstance(error, RetryableError):
        return 409
    assert isinstance(error, FatalError)
    return 500


class ControlVerbs:
    """The control interface of one engine. Raises StitchError for whatever is refused or failed."""

    def __init__(self, engine: Engine, schema: Schema) -> None:
        self._engine = engine
        self._schema = schema
        self._open: _OpenStage | None = None
        self._turns = Turns()

    async def describe(self) -> Body:
        return wire.description_to_json(await self._engine.describe())

    async def bind(self, body: Body) -> Body:
        ref = wire.ref_from_json({k: body.get(k) for k in ("run", "version")}, "bind")
        digest = wire.text_field(body, "digest")
        self._open = None
        await self._turns.run(self._engine.bind(ref, digest))
        return DONE

    async def open_stage(self, body: Body) -> Body:
        self._open = _OpenStage(
            wire.text_field(body, "stage_id"),
            wire.ref_from_json(body.get("base"), "base"),
            wire.ref_from_json(body.get("target"), "target"),
            self._schema,
        )
        return DONE

    def check_open(self, stage_id: str) -> None:
        """Raise EngineError unless parts of this stage are wanted; ask before reading one."""
        self._opened(stage_id)

    def put_part(self, stage_id: str, number: str, data: bytes) -> Body:
        stage = self._opened(stage_id)
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise UsageError(f"part number {number!r:.40} is not a number")
        stage.parts.put(int(number), data)
        return DONE

    async def seal_stage(self, stage_id: str, body: Body) -> Body:
        stage = self._opened(stage_id)
        num_parts, num_changed = (
            wire.count_field(body, "num_parts"),
            wire.count_field(body, "num_changed"),
        )
        await self._turns.run(self._seal(stage, num_parts, num_changed))
        return DONE

    async def discard(self) -> Body:
        self._open = None
        await self._turns.run(self._engine.discard())
        return DONE

    async def commit(self, body: Body) -> Body:
        receipt = await self._turns.run(self._engine.commit(wire.text_field(body, "stage_id")))
        return wire.receipt_to_json(receipt)

    async def roll_back(self, body: Body) -> Body:
        await self._turns.run(self._engine.roll_back(wire.ref_from_json(body, "roll_back")))
        return DONE

    async def verify(self, body: Body) -> Body:
        names = wire.names_field(body, "tensors")
        return wire.report_to_json(await self._turns.run(self._engine.verify(names)))

    def _opened(self, stage_id: str) -> _OpenStage:
        if self._open is None or self._open.stage_id != stage_id:
            raise EngineError(
                f"stage {stage_id!r:.200} is not open: it was replaced, dropped or never begun"
            )
        return self._open

    async def _seal(self, stage: _OpenStage, num_parts: int, num_changed: int) -> None:
        update = await asyncio.to_thread(stage.parts.seal, num_parts, num_changed)
        await self._engine.stage(stage.stage_id, stage.base, stage.target, update)
        if self._open is stage:
            self._open = None


class _OpenStage:
    """A stage whose parts are arriving."""

    def __init__(self, stage_id: str, base: VersionRef, target: VersionRef, schema: Schema) -> None:
        self.stage_id = stage_id
        self.base = base
        self.target = target
        self.parts = PartsBox(schema)
