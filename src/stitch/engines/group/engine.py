"""GroupEngine: the engine port over a group of ranks, old or new on all of them or gone.

The transaction. Staging writes the update set into private files, which every rank reads, resolves
to its own places and compares with its own bits, while serving goes on. A commit pauses the engine,
has every rank write and read back, and if any of them reports a failure has all of them restore
their old bits. Where that cannot be established the engine ends with all its processes: it never
serves a mix of two versions.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from stitch.codec import DigestState, UpdateSet
from stitch.engines import rules
from stitch.engines.group.staging import StageFiles
from stitch.engines.group.transaction import transact
from stitch.engines.group.workers import Workers
from stitch.engines.port import CommitReceipt, EngineDescription, EngineState, VerifyReport
from stitch.engines.ranks.agreement import Agreement
from stitch.engines.ranks.port import check
from stitch.errors import (
    EngineError,
    FatalReplicaError,
    StitchError,
    UsageError,
)
from stitch.tensors.reader import batches_of_names, spec_for
from stitch.types import Schema, VersionRef

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class GroupTraits:
    """What an engine's plugin says of it; see EngineDescription."""

    engine: str
    stamps_versions: bool = False
    salt_field: str | None = None
    blocked_routes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Stage:
    stage_id: str
    base: VersionRef
    target: VersionRef
    num_changed: int


class GroupEngine:
    """Implements the Engine port; make it with `learned`.

    `scratch` is an existing directory that this process and all ranks can reach; update sets pass
    through private files in it.
    """

    def __init__(
        self, workers: Workers, agreement: Agreement, traits: GroupTraits, *, scratch: Path
    ) -> None:
        self._workers = workers
        self._agreement = agreement
        self._schema = agreement.schema
        self._traits = traits
        self._files = StageFiles(agreement.schema, scratch)
        self._boot = uuid.uuid4().hex
        self._order = asyncio.Lock()
        self._state: EngineState = "ready"
        self._ref: VersionRef | None = None
        self._staged: _Stage | None = None
        self._last: _Stage | None = None
        self._receipt: CommitReceipt | None = None

    @classmethod
    async def learned(
        cls, workers: Workers, schema: Schema, traits: GroupTraits, *, scratch: Path
    ) -> GroupEngine:
        """Have the ranks learn where `schema` lives in them; before requests are served.

        Raises EngineError if their answers do not fit together. Tensors that cannot be changed in
        place are logged, described, and refused when a stage touches them.
        """
        answers = await workers.call("learn")
        agreement = Agreement.of(schema, answers)
        check(await workers.call("settle", agreement.settlement))
        for note in agreement.notes:
            _log.info("event=placement note=%r", note)
        for name, why in agreement.refused.items():
            _log.warning("event=not_in_place tensor=%s reason=%r", name, why)
        _log.info(
            "event=placement_learned ranks=%d tensors=%d refused=%d seconds_s=%.3f",
            len(answers), len(schema), len(agreement.refused),
            max(float(answer.get("seconds_s", 0.0)) for answer in answers),
        )  # fmt: skip
        return cls(workers, agreement, traits, scratch=scratch)

    async def describe(self) -> EngineDescription:
        staged = self._staged
        return EngineDescription(
            engine=self._traits.engine,
            boot=self._boot,
            ref=self._ref,
            schema_digest=self._schema.digest,
            state=self._state if self._workers.is_alive() else "failed",
            staged=staged.stage_id if staged else None,
            staged_target=staged.target if staged else None,
            committed=self._last.stage_id if self._last else None,
            stamps_versions=self._traits.stamps_versions,
            salt_field=self._traits.salt_field,
            blocked_routes=self._traits.blocked_routes,
            fixed_tensors=tuple(self._agreement.refused),
        )

    async def bind(self, ref: VersionRef, digest: str) -> None:
        async with self._order:
            self._check_provable()
            found = (await self._sure(self._measure(self._schema))).version_digest()
            rules.check_bind(found, ref, digest)
            await self._drop()
            await self._workers.label(ref)
            self._ref = ref

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        async with self._order:
            rules.check_new(stage_id, self._last)
            await self._drop()
            rules.check_base(base, self._ref)
            self._agreement.check_update(update)
            self._state = "staging"
            try:
                await self._sure(self._distribute(stage_id, update))
            finally:
                self._state = "ready"
            self._staged = _Stage(
                stage_id=stage_id, base=base, target=target, num_changed=update.num_changed
            )

    async def commit(self, stage_id: str) -> CommitReceipt:
        async with self._order:
            if self._last is not None and self._last.stage_id == stage_id and self._receipt:
                return self._receipt
            stage = rules.held(stage_id, self._staged)
            self._staged = None  # whatever comes of it, it cannot be committed another time
            pause_ms = await self._paused(
                f"commit of {stage.target}", "commit", "undo", stage, stage.target
            )
            self._last = stage
            self._receipt = CommitReceipt(
                ref=stage.target, pause_ms=pause_ms, num_changed=stage.num_changed
            )
            return self._receipt

    async def roll_back(self, to: VersionRef) -> None:
        async with self._order:
            last = rules.leading_to(to, self._last)
            await self._paused(f"roll-back to {to}", "undo", "commit", last, to)
            await self._drop()

    async def discard(self) -> None:
        async with self._order:
            if self._staged is not None:
                self._staged = None
                await self._sure(self._everywhere("discard"))

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        schema = self._schema
        wanted = schema if names is None else Schema.of(spec_for(schema, n, 0, 0) for n in {*names})
        async with self._order:
            start = time.perf_counter()
            state = await self._sure(self._measure(wanted))
            return VerifyReport(
                ref=self._ref,
                digest=state.version_digest() if names is None else "",
                tensors={
                    spec.name: state.tensor_digest(schema.index[spec.name])
                    for spec in wanted.tensors
                },
                seconds_s=time.perf_counter() - start,
            )

    async def close(self) -> None:
        self._files.drop()

    # --- inside ----------------------------------------------------------------------------------

    def _check_provable(self) -> None:
        """A version is proven by all of its tensors: UsageError if one is out of reach."""
        refused = self._agreement.refused
        if refused:
            name, why = next(iter(refused.items()))
            raise UsageError(
                f"{len(refused)} tensors can be neither proven nor changed in place in this "
                f"engine, {name} among them: {why}; serve the stock engine instead, which reloads "
                "whole checkpoints: --engine-mode reload"
            )

    async def _measure(self, wanted: Schema) -> DigestState:
        """The lanes of the wanted tensors as the ranks hold them, a few tensors at a time."""
        total = DigestState(self._schema, np.zeros((len(self._schema), 2), np.uint64))
        for names in batches_of_names(wanted):
            answers = await self._workers.call("lanes", names)
            total = total.plus(self._agreement.combine(answers, names).lanes)
        return total

    async def _everywhere(self, method: str, *args: object) -> None:
        check(await self._workers.call(method, *args))

    async def _sure(self, work: Awaitable[_Result]) -> _Result:
        """Do work in which answers must not get lost, nor a rank come into doubt."""
        try:
            return await work
        except FatalReplicaError as error:
            self._end(str(error))
            raise

    async def _drop(self) -> None:
        """Forget the stage and the undo of the last commit, here and on all ranks."""
        self._staged, self._last, self._receipt = None, None, None
        self._files.drop()
        await self._sure(self._everywhere("forget"))

    async def _distribute(self, stage_id: str, update: UpdateSet) -> None:
        """Have every rank read, resolve and check the update."""
        try:
            number = 0
            async for path in self._files.write(stage_id, update):
                await self._everywhere("stage_part", stage_id, number, str(path))
                path.unlink()
                number += 1
            await self._everywhere("seal", stage_id, number, update.num_changed)
        except OSError as error:
            await self._everywhere("discard")
            raise EngineError(f"stage {stage_id!r}: cannot hand the update on: {error}") from error
        except StitchError as error:
            if not isinstance(error, FatalReplicaError):
                await self._everywhere("discard")
            raise
        finally:
            self._files.drop()

    async def _paused(
        self, what: str, do: str, undo: str, stage: _Stage, label: VersionRef
    ) -> float:
        """`do` on all ranks and label, or `undo` on all of them; returns the pause in ms.

        Raises EngineError when the engine serves what it served before. Ends it when that is not
        certain.
        """
        self._state = "committing"
        try:
            outcome = await transact(
                self._workers, what=what, do=do, undo=undo, stage_id=stage.stage_id, label=label
            )
        except BaseException as error:  # the edge of the transaction: nothing may be half done
            self._end(f"{what} ended without an outcome: {error!r}")
            raise
        self._state = "ready"
        if outcome.fault is not None:
            raise EngineError(f"{what} failed and was undone: {outcome.fault}")
        self._ref = label
        return outcome.pause_ms

    def _end(self, reason: str) -> None:
        self._state = "failed"
        self._workers.exit(reason)
