"""ReloadEngine: the engine port over a stock engine and the generations that it loads.

The transaction. Staging writes and proves a new generation while the engine serves. A commit pauses
the engine, makes that generation current, has the engine load it, compares what the engine can say
of its parameters with what they must be, and lets it go on; then fixed prompts are asked, before
the caller learns that the commit happened. If a load fails the old generation is loaded again, and
everything compared with what it was. See `reloader` for what happens where that fails too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.codec import DigestState, UpdateSet
from stitch.engines import rules
from stitch.engines.port import CommitReceipt, EngineDescription, EngineState, VerifyReport
from stitch.engines.reload.answers import disagreement
from stitch.engines.reload.checksums import Checksums
from stitch.engines.reload.generations import Generation, Generations
from stitch.engines.reload.reloader import Reloader
from stitch.engines.reload.selftest import Proven
from stitch.engines.reload.stock import StockEngine
from stitch.engines.turns import Turns
from stitch.errors import FatalReplicaError, RetryableError, StitchError
from stitch.tensors import open_checkpoint
from stitch.tensors.reader import spec_for
from stitch.types import Schema, VersionRef


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The generation `built` leads from `base` to `target`; `before` was current when it was made.

    expected: the checksums that the engine must report once it is loaded.
    """

    stage_id: str
    base: VersionRef
    target: VersionRef
    num_changed: int
    changed: frozenset[str]
    before: Generation
    built: Generation
    expected: Checksums


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A committed stage; `proven` is what the engine was before."""

    stage: _Stage
    proven: Proven
    receipt: CommitReceipt

    @property
    def stage_id(self) -> str:
        return self.stage.stage_id

    @property
    def base(self) -> VersionRef:
        return self.stage.base


class ReloadEngine:
    """Implements the Engine port; make it with `opened`."""

    def __init__(self, stock: StockEngine, generations: Generations, *, fresh: bool) -> None:
        self._generations = generations
        self._reloader = Reloader(stock, generations, fresh=fresh)
        self._traits = stock.traits
        self._turns = Turns()
        self._state: EngineState = "ready"
        self._staged: _Stage | None = None
        self._last: _Done | None = None

    @classmethod
    async def opened(
        cls, stock: StockEngine, generations: Generations, *, fresh: bool
    ) -> ReloadEngine:
        """An engine that is proven to hold the current generation.

        fresh: it was started on that just now. Raises UsageError for settings that cannot be served
        so, FatalReplicaError for an engine that is in doubt or whose reloads are not to be relied
        on, EngineUnreachableError.
        """
        it = cls(stock, generations, fresh=fresh)
        await it._reloader.check_setup()
        await it._turns.run(it._reloader.establish())
        return it

    # --- the port --------------------------------------------------------------------------------

    async def describe(self) -> EngineDescription:
        turns, num_begun = self._turns, self._turns.num_begun
        if not turns.busy and not self._reloader.failed:
            await self._reloader.look(lambda: turns.num_begun == num_begun)
        staged, last = self._staged, self._last
        return EngineDescription(
            engine=f"{self._traits.engine}, reloaded",
            boot=self._reloader.boot,
            ref=self._ref,
            schema_digest=self._generations.schema.digest,
            state="failed" if self._reloader.failed else self._state,
            staged=staged.stage_id if staged else None,
            staged_target=staged.target if staged else None,
            committed=last.stage_id if last else None,
            salt_field=self._traits.salt_field,
            blocked_routes=self._traits.blocked_routes,
        )

    async def bind(self, ref: VersionRef, digest: str) -> None:
        await self._turns.run(self._bind(ref, digest))

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        await self._turns.run(self._stage(stage_id, base, target, update))

    async def commit(self, stage_id: str) -> CommitReceipt:
        return await self._turns.run(self._commit(stage_id))

    async def roll_back(self, to: VersionRef) -> None:
        await self._turns.run(self._roll_back(to))

    async def discard(self) -> None:
        await self._turns.run(self._discard())

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        """Proves that the engine holds what it was told to load, and digests that.

        With `names` the engine is still asked for checksums of everything.
        """
        return await self._turns.run(self._verify(names))

    async def close(self) -> None:
        """Wait for what is under way; the engine keeps running, with its generation."""
        await self._turns.all_ended()
        await self._reloader.stock.close()
        self._generations.close()

    # --- the verbs, one at a time ----------------------------------------------------------------

    async def _bind(self, ref: VersionRef, digest: str) -> None:
        rules.check_bind(self._generations.current.digest, ref, digest)
        await self._forget()  # first: a proof needs room for a generation
        await self._reloader.establish()
        self._generations.relabel(ref)
        await self._reloader.label_as(ref)

    async def _stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        rules.check_new(stage_id, self._last)
        proven = self._reloader.proven
        await self._forget()
        rules.check_base(base, self._ref)
        before, tensors = self._generations.current, self._generations.schema.tensors
        self._state = "staging"
        try:
            built, expected = await asyncio.to_thread(self._build, update, target, proven)
        finally:
            self._state = "ready"
        self._staged = _Stage(
            stage_id=stage_id,
            base=base,
            target=target,
            num_changed=update.num_changed,
            changed=frozenset(tensors[it.tensor].name for it in update.updates if it.num_changed),
            before=before,
            built=built,
            expected=expected,
        )

    async def _commit(self, stage_id: str) -> CommitReceipt:
        if self._last is not None and self._last.stage_id == stage_id:
            return self._last.receipt
        stage, proven = rules.held(stage_id, self._staged), self._reloader.proven
        self._staged = None  # whatever comes of it, it cannot be committed another time
        try:
            pause_ms = await self._change(stage, stage.before, stage.built, stage.expected)
        except RetryableError:  # the one before is current
            await asyncio.to_thread(self._generations.drop, stage.built)
            raise
        receipt = CommitReceipt(ref=stage.target, pause_ms=pause_ms, num_changed=stage.num_changed)
        self._last = _Done(stage=stage, proven=proven, receipt=receipt)
        return receipt

    async def _roll_back(self, to: VersionRef) -> None:
        last = rules.leading_to(to, self._last)
        stage = last.stage
        await self._change(stage, stage.built, stage.before, last.proven.checksums)
        wrong = disagreement(last.proven.answers, self._reloader.proven.answers)
        if wrong:
            await self._reloader.end(f"rolled back to {to}, it answers otherwise: {wrong}")
        await self._forget()

    async def _change(
        self, stage: _Stage, old: Generation, new: Generation, expected: Checksums
    ) -> float:
        self._state = "committing"
        try:
            return await self._reloader.change(old, new, expected=expected, changed=stage.changed)
        finally:
            self._state = "ready"

    async def _discard(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            await asyncio.to_thread(self._generations.drop, staged.built)

    async def _verify(self, names: Sequence[str] | None) -> VerifyReport:
        schema = self._generations.schema
        wanted = schema if names is None else Schema.of(spec_for(schema, n, 0, 0) for n in {*names})
        start = time.perf_counter()
        await self._reloader.check_weights()
        digests = await asyncio.to_thread(self._files, names)
        return VerifyReport(
            ref=self._ref,
            digest=digests.version_digest() if names is None else "",
            tensors={s.name: digests.tensor_digest(i) for i, s in enumerate(wanted.tensors)},
            seconds_s=time.perf_counter() - start,
        )

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _ref(self) -> VersionRef | None:
        return self._generations.current.ref

    def _build(
        self, update: UpdateSet, target: VersionRef, proven: Proven
    ) -> tuple[Generation, Checksums]:
        built = self._generations.build(update, target)
        with open_checkpoint(built.path) as checkpoint:
            return built, proven.knowledge.expected(checkpoint)

    async def _forget(self) -> None:
        """Drop the stage and the undo of the last commit, with their generations."""
        last, self._last = self._last, None
        await self._discard()
        if last is not None:
            current = self._generations.current.path
            for generation in (last.stage.before, last.stage.built):
                if generation.path != current:
                    await asyncio.to_thread(self._generations.drop, generation)

    def _files(self, names: Sequence[str] | None) -> DigestState:
        """Digests of what the engine was told to load, read anew."""
        current = self._generations.current
        try:
            found = self._generations.prove(names)
        except (StitchError, OSError) as error:
            raise FatalReplicaError(f"the engine's checkpoint is damaged: {error}") from error
        for index, spec in enumerate(found.schema.tensors):
            wanted = current.digests.tensor_digest(current.digests.schema.index[spec.name])
            if found.tensor_digest(index) != wanted:
                raise FatalReplicaError(
                    f"the engine's checkpoint {current.path} is damaged: tensor {spec.name} has "
                    f"digest {found.tensor_digest(index)}, written was {wanted}"
                )
        return found
