"""The port of the embedded engine: stage on a worker thread, commit on the decode thread."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stitch.codec import DigestState, UpdateSet
from stitch.engines import rules
from stitch.engines.embedded.loop import DecodeLoop, exit_loudly
from stitch.engines.embedded.weights import Change, LiveWeights
from stitch.engines.port import CommitReceipt, EngineDescription, EngineState, VerifyReport
from stitch.errors import EngineError, StitchError
from stitch.tensors.reader import Subset, WeightReader
from stitch.types import VersionRef

NAME = "embedded"
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _Stage:
    stage_id: str
    base: VersionRef
    target: VersionRef
    change: Change


class EmbeddedEngine:
    """Implements the Engine port over a decode loop and the weights of its model.

    `threads` is how many a digest may use. Its prefix cache namespace is None: there is no prefix
    cache, keys and values never outlive their request.
    """

    def __init__(self, loop: DecodeLoop, weights: LiveWeights, *, threads: int = 1) -> None:
        self._loop = loop
        self._weights = weights
        self._threads = threads
        self._boot = uuid.uuid4().hex
        self._order = asyncio.Lock()
        self._state: EngineState = "ready"
        self._staged: _Stage | None = None
        self._last: _Stage | None = None
        self._receipt: CommitReceipt | None = None

    async def describe(self) -> EngineDescription:
        staged = self._staged
        return EngineDescription(
            engine=NAME,
            boot=self._boot,
            ref=self._loop.ref,
            schema_digest=self._weights.schema.digest,
            state=self._state if self._loop.alive else "failed",
            staged=staged.stage_id if staged else None,
            staged_target=staged.target if staged else None,
            committed=self._last.stage_id if self._last else None,
            stamps_versions=True,
            salt_field=None,
            blocked_routes=("/stitch/*",),
        )

    async def bind(self, ref: VersionRef, digest: str) -> None:
        async with self._order:
            state = await self._digests(self._weights)
            found = state.version_digest()
            rules.check_bind(found, ref, digest)
            await self._on_decode_thread(lambda: self._label(ref))
            self._staged, self._last, self._receipt = None, None, None

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        async with self._order:
            rules.check_new(stage_id, self._last)
            self._staged, self._last, self._receipt = None, None, None
            rules.check_base(base, self._loop.ref)
            self._state = "staging"
            try:
                change = await asyncio.to_thread(self._weights.prepare, update)
            finally:
                self._state = "ready"
            self._staged = _Stage(stage_id=stage_id, base=base, target=target, change=change)

    async def commit(self, stage_id: str) -> CommitReceipt:
        async with self._order:
            if self._last is not None and self._last.stage_id == stage_id and self._receipt:
                return self._receipt
            stage = rules.held(stage_id, self._staged)
            self._state = "committing"
            try:
                pause_ms = await self._on_decode_thread(lambda: self._write(stage))
            finally:
                self._state = "ready"
            self._staged, self._last = None, stage
            self._receipt = CommitReceipt(
                ref=stage.target, pause_ms=pause_ms, num_changed=stage.change.num_changed
            )
            return self._receipt

    async def roll_back(self, to: VersionRef) -> None:
        async with self._order:
            last = rules.leading_to(to, self._last)
            await self._on_decode_thread(lambda: self._unwrite(last))
            self._last, self._receipt = None, None

    async def discard(self) -> None:
        async with self._order:
            self._staged = None

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        reader = self._weights if names is None else Subset(self._weights, names)
        async with self._order:
            start = time.perf_counter()
            state = await self._digests(reader)
            specs = reader.schema.tensors
            return VerifyReport(
                ref=self._loop.ref,
                digest=state.version_digest() if names is None else "",
                tensors={spec.name: state.tensor_digest(i) for i, spec in enumerate(specs)},
                seconds_s=time.perf_counter() - start,
            )

    async def close(self) -> None:
        return None

    async def _digests(self, reader: WeightReader) -> DigestState:
        return await asyncio.to_thread(DigestState.of, reader, threads=self._threads)

    async def _on_decode_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.wrap_future(self._loop.call(work))

    # --- on the decode thread: no step can run meanwhile ------------------------------------------

    def _label(self, ref: VersionRef) -> None:
        self._loop.ref = ref

    def _write(self, stage: _Stage) -> float:
        """Make a stage live; old-or-new, or the process ends. Returns the pause in ms."""
        start = time.perf_counter()
        _transact(stage.change.apply, stage.change.undo, f"commit of {stage.target}")
        self._loop.ref = stage.target
        return (time.perf_counter() - start) * 1e3

    def _unwrite(self, stage: _Stage) -> None:
        change = stage.change
        _transact(change.undo, change.apply, f"roll-back to {stage.base}")
        self._loop.ref = stage.base


def _transact(do: Callable[[], None], undo: Callable[[], None], what: str) -> None:
    """Run `do`; on any error run `undo` and raise EngineError; if that fails too, exit."""
    try:
        do()
    except Exception as error:  # the edge of a transaction: whatever failed, the old bits return
        try:
            undo()
        except Exception as second:
            exit_loudly(f"{what} failed ({error!r}) and its undo failed ({second!r})")
        reason = str(error) if isinstance(error, StitchError) else repr(error)
        raise EngineError(f"{what} failed and was undone: {reason}") from error
