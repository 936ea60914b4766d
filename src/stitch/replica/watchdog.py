"""Looks at the engine from outside: gone, hung, failed, or another one than before.

It never disturbs a transaction: a long stage or a commit that keeps the engine busy is not a
failure, and the reconciler deals with replies that get lost there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from stitch.engines.port import EngineDescription
from stitch.errors import EngineUnreachableError, FatalReplicaError, StitchError
from stitch.replica.committer import Committer
from stitch.replica.state import ReplicaStatus

log = logging.getLogger("stitch.replica.watchdog")


class Watchdog:
    """`watch` returns only by raising FatalReplicaError, once the engine counts as lost."""

    def __init__(
        self,
        status: ReplicaStatus,
        committer: Committer,
        *,
        interval_s: float,
        down_budget_s: float,
        on_changed: Callable[[], None],
    ) -> None:
        self._status = status
        self._committer = committer
        self._interval_s = interval_s
        self._down_budget_s = down_budget_s
        self._on_changed = on_changed
        self._look_now = asyncio.Event()
        self._vouching = asyncio.Lock()
        self._num_asked = 0
        self._num_vouched = 0
        self._doubt: str | None = None

    def look_now(self) -> None:
        """Someone met a broken connection to the engine."""
        self._look_now.set()

    async def watch(self) -> None:
        while True:
            if not self._committer.lock.locked():
                async with self._committer.lock:
                    await self._look()
            self._look_now.clear()
            down = self._status.engine_down_since_s is not None
            try:
                pause_s = min(self._interval_s, 0.5) if down else self._interval_s
                await asyncio.wait_for(self._look_now.wait(), pause_s)
                await asyncio.sleep(min(0.1, pause_s))  # many requests break at once: look once
            except TimeoutError:
                continue

    async def vouch(self) -> None:
        """Raise EngineUnreachableError unless the engine that answers now is the proven one.

        Those who ask while a look is under way share the next one.
        """
        self._num_asked += 1
        mine = self._num_asked
        async with self._vouching:
            if self._num_vouched < mine:
                covered = self._num_asked
                self._doubt = await self._doubt_about_engine()
                self._num_vouched = covered
            if self._doubt is not None:
                raise EngineUnreachableError(self._doubt)

    async def _doubt_about_engine(self) -> str | None:
        status, known = self._status, self._status.engine
        try:
            now = await self._committer.engine.describe()
        except StitchError as error:
            return str(error)
        if known is not None and now.boot != known.boot:
            if status.engine is known:  # nobody has met the new one yet
                self._on_changed()
            return f"the engine restarted (boot {known.boot}, now {now.boot}) and is not proven yet"
        return None if status.caught_up else f"what the engine serves is not proven: {status.doing}"

    async def _look(self) -> None:
        try:
            now = await self._committer.engine.describe()
        except EngineUnreachableError as error:
            self._missed(error)
            return
        except StitchError as error:
            raise FatalReplicaError(f"the engine refuses to describe itself: {error}") from error
        if now.state == "failed":
            raise FatalReplicaError("the engine reports that it failed")
        if self._status.engine_down_since_s is not None:
            self._status.engine_down_since_s = None
            log.info("event=engine_back engine=%s", now.engine)
            self._status.tell()
        self._compare(now)

    def _missed(self, error: EngineUnreachableError) -> None:
        status = self._status
        now_s = time.monotonic()
        if status.engine_down_since_s is None:
            status.engine_down_since_s = now_s
            status.note_error(error)
            log.warning("event=engine_silent error=%s", error)
            status.tell()
        silent_s = now_s - status.engine_down_since_s
        if silent_s >= self._down_budget_s:
            raise FatalReplicaError(
                f"the engine has not answered for {silent_s:.0f} s (budget "
                f"{self._down_budget_s:g} s): {error}"
            ) from error

    def _compare(self, now: EngineDescription) -> None:
        """Another process, or another label than ours, must be proven before it is served."""
        status = self._status
        known = status.engine
        if known is None:
            return
        if now.boot != known.boot or (status.ref is not None and now.ref != status.ref):
            log.warning(
                "event=engine_changed boot=%s ref=%s expected_boot=%s expected_ref=%s",
                now.boot, now.ref, known.boot, status.ref,
            )  # fmt: skip
            self._on_changed()
        elif status.ref is not None:
            status.engine = now
