"""Reloader: one stock engine, what is proven of it, and the pause in which it changes generation.

Where what the engine holds cannot be established it is in doubt: it is left paused, a note of that
is kept with the generations, and FatalReplicaError ends the replica.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Set
from typing import Any, NoReturn, TypeVar

from stitch import failpoints
from stitch.engines.reload.answers import disagreement
from stitch.engines.reload.checksums import Checksums
from stitch.engines.reload.doubt import Doubt
from stitch.engines.reload.generations import Generation, Generations
from stitch.engines.reload.selftest import PROMPTS, Proven, prove_reload
from stitch.engines.reload.stock import StockEngine, StockLostError, StockRefusedError
from stitch.errors import EngineError, EngineUnreachableError, FatalReplicaError, StitchError
from stitch.types import VersionRef

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_FAILURES = (StockRefusedError, StockLostError)


class Reloader:
    """Used by one task at a time, but for `look`."""

    def __init__(self, stock: StockEngine, generations: Generations, *, fresh: bool) -> None:
        """fresh: the engine was started on the current generation just now."""
        self.stock = stock
        self.boot = uuid.uuid4().hex
        self.failed = False
        self._generations = generations
        self._doubt = Doubt(generations.directory)
        self._fresh = fresh
        self._label: str | None = None
        """What we labelled the engine with last; None while what it holds is not proven."""
        self._proven: Proven | None = None

    @property
    def proven(self) -> Proven:
        """Raises EngineError while nothing is, FatalReplicaError once the engine is in doubt."""
        self._check_sound()
        if self._proven is None:
            raise EngineError("what the engine holds is not proven: bind it first")
        return self._proven

    async def check_setup(self) -> None:
        """Raise UsageError for settings that cannot be served so, FatalReplicaError for an engine
        that is in doubt, EngineUnreachableError."""
        try:
            await self.stock.check_setup()
            self._doubt.check(await self.stock.label())
        except StockLostError as error:
            raise EngineUnreachableError(str(error)) from error
        except StockRefusedError as error:
            raise FatalReplicaError(f"{self.stock.traits.engine}: {error}") from error

    async def look(self, undisturbed: Callable[[], bool]) -> None:
        """See whether the engine is there, and still the one that was proven.

        What it says of its label counts only if then nothing else was begun: `undisturbed()`.
        """
        boot = self.boot
        try:
            label = await self.stock.label()
        except StockLostError as error:
            raise EngineUnreachableError(str(error)) from error
        except StockRefusedError as error:
            self.failed = True
            _log.error("event=engine_failed error=%s", error)
            return
        if not undisturbed() or boot != self.boot:
            return
        if self._label is not None and label != self._label:
            _log.warning("event=engine_restarted label=%s expected=%s", label, self._label)
            self._label, self._proven, self._fresh = None, None, False
            self.boot = uuid.uuid4().hex

    async def establish(self) -> None:
        """Prove what the engine holds, by loading the current generation, unless it is known.

        Raises FatalReplicaError if that cannot be done, or the engine is in doubt.
        """
        self._check_sound()
        if self._proven is not None:
            await self.check_label()
            return
        label = f"stitch.unproven.{self.boot[:12]}"
        self._doubt.expect(label)
        try:
            await self.stock.set_label(label)  # nobody mistakes it for what it was before
            proven = await prove_reload(
                self.stock, self._generations, label=label, fresh=self._fresh
            )
        except FatalReplicaError:
            self.failed = True
            raise
        except _FAILURES as error:
            await self.end(f"it could not be proven to reload its weights: {error}")
        self._fresh = False
        self._proven, self._label = proven, label
        self._doubt.clear()

    async def label_as(self, ref: VersionRef) -> None:
        self._doubt.expect(str(ref))
        await self._sure(self.stock.set_label(str(ref)), f"it could not be labelled {ref}")
        self._label = str(ref)
        self._doubt.clear()

    async def check_label(self) -> None:
        """Raise EngineError or EngineUnreachableError unless this is the engine that was proven."""
        try:
            label = await self.stock.label()
        except StockLostError as error:
            raise EngineUnreachableError(str(error)) from error
        except StockRefusedError as error:
            await self.end(f"it does not answer as it should: {error}")
        if label != self._label:
            raise EngineError(f"the engine restarted: its label is {label!r}, not {self._label!r}")

    async def check_weights(self) -> None:
        """Have the engine say what it holds: all as when it was proven, or the end."""
        proven = self.proven
        await self.check_label()
        try:
            found = await self.stock.checksums()
        except StockLostError as error:
            raise EngineUnreachableError(str(error)) from error
        except StockRefusedError as error:
            await self.end(f"it cannot say what it holds: {error}")
        known = proven.checksums
        changed = [it.name for it in known.keys() | found.keys() if known.get(it) != found.get(it)]
        if changed:
            await self.end(f"its weights changed, and nobody told it to: {sorted(changed)[:4]}")

    async def change(
        self, old: Generation, new: Generation, *, expected: Checksums, changed: Set[str]
    ) -> float:
        """Bring the engine from the current generation to another one; the pause in ms.

        expected: checksums that it must report then; changed: tensors that differ. Raises
        EngineError when it is proven to hold the old one as before, else ends.
        """
        proven, label = self.proven, str(new.ref)
        await self.check_label()
        self._doubt.expect(str(old.ref), label)
        start = time.perf_counter()
        try:
            await self.stock.pause()
        except _FAILURES as error:
            await self._sure(self.stock.resume(), f"it did not pause ({error})")
            self._doubt.clear()
            raise EngineError(f"the engine did not pause: {error}") from error
        failpoints.reach("reload.paused")
        try:
            self._generations.switch(new)
            await self.stock.load(str(self._generations.link), label)
            failpoints.reach("reload.loaded")
            found = await self.stock.checksums()
            faults = proven.knowledge.faults(
                found, expected=expected, before=proven.checksums, changed=changed
            )
            if wrong := list(faults):
                raise StockRefusedError("; ".join(wrong[:4]))
        except (*_FAILURES, OSError) as error:
            await self._go_back(old, proven, error)
        await self._sure(self.stock.resume(), "it has the new weights and does not go on")
        pause_ms = (time.perf_counter() - start) * 1e3
        failpoints.reach("reload.resumed")
        answers = await self._sure(self.stock.answers(PROMPTS), "after a reload")
        self._proven = Proven(knowledge=proven.knowledge, checksums=found, answers=answers)
        self._label = label
        self._doubt.clear()
        _log.info("event=reloaded label=%s pause_ms=%.1f", label, pause_ms)
        return pause_ms

    async def _go_back(self, old: Generation, proven: Proven, error: Exception) -> NoReturn:
        """After a failed load: the old generation again, and everything as it was; or the end."""
        if not self.stock.may_retry(error):
            await self.end(f"a reload failed, and what its ranks hold is not known: {error}")
        _log.warning("event=reload_failed error=%s", error)
        try:
            self._generations.switch(old)
            await self.stock.load(str(self._generations.link), str(old.ref))
            if await self.stock.checksums() != proven.checksums:
                raise StockRefusedError("it does not hold what it held before")
            await self.stock.resume()
            wrong = disagreement(proven.answers, await self.stock.answers(PROMPTS))
            if wrong:
                raise StockRefusedError(f"it does not answer as before: {wrong}")
        except (*_FAILURES, OSError) as second:
            await self.end(f"a reload failed ({error}), and going back too ({second})")
        self._doubt.clear()
        raise EngineError(f"the engine could not load the version and went back: {error}")

    async def end(self, reason: str) -> NoReturn:
        """The engine is in doubt: it must not go on, and nobody may take it for proven."""
        self.failed = True
        try:
            self._doubt.note(reason, self._label)
        except StitchError as error:  # the disk is full, say; paused it must be all the more
            _log.error("event=doubt_not_noted error=%s", error)
        with contextlib.suppress(*_FAILURES):
            await self.stock.pause()
        raise FatalReplicaError(
            f"{self.stock.traits.engine} is in doubt: {reason}; it was left paused, restart it"
        )

    def _check_sound(self) -> None:
        if self.failed:
            raise FatalReplicaError("the engine is in doubt")

    async def _sure(self, work: Coroutine[Any, Any, _Result], what: str) -> _Result:
        """Do what must not fail; the end if it does."""
        try:
            return await work
        except _FAILURES as error:
            await self.end(f"{what}: {error}")
