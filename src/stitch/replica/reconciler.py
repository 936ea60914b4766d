"""The replica's state machine: follow the board, one proven version after the other.

    BOOTING -> VERIFYING -> CATCHING_UP -> SERVING <-> FETCHING / STAGING / COMMITTING

The mirror always equals the engine's weights plus the update that is being brought to it. Whatever
goes wrong before the commit, the mirror is taken back and the engine goes on with what it serves;
nothing is ever skipped.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stitch import failpoints
from stitch.board import Board, Run
from stitch.codec import UpdateSet
from stitch.errors import (
    FatalError,
    NoRouteError,
    RunNotFoundError,
    StitchError,
    StoreError,
    UsageError,
)
from stitch.mirror import AdvanceError
from stitch.replica.committer import Committed, Committer, EngineRestartedError
from stitch.replica.config import ReplicaConfig
from stitch.replica.current_run import CurrentRun
from stitch.replica.prover import Prover
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.state import CommitTiming, ReplicaStatus, describe_error
from stitch.replica.switching import Switcher
from stitch.replica.worker import Worker
from stitch.types import ReplicaState, VersionRef

if TYPE_CHECKING:
    from stitch.mirror import Mirror

log = logging.getLogger("stitch.replica.reconciler")

MAX_COALESCE_ROUNDS = 4
"""Looks for still newer versions before staging; a fast publisher must not starve the commit."""
MIN_RETRY_S = 0.2
MIN_LOOK_INTERVAL_S = 0.05
"""Least time between attempts after a fault, however often it is woken."""


class Reconciler:
    """Owns run, mirror and engine version. `run_forever` returns only by raising."""

    def __init__(
        self,
        config: ReplicaConfig,
        status: ReplicaStatus,
        metrics: ReplicaMetrics,
        worker: Worker,
        wake: asyncio.Event,
    ) -> None:
        self._config = config
        self._status = status
        self._metrics = metrics
        self._worker = worker
        self._wake = wake
        self._num_faults = 0
        self._reprove = False
        self._fetched_bytes = 0
        self._looked_s = float("-inf")
        self._switcher = Switcher(config, worker)
        self._current = CurrentRun(config.run)
        self.on_run: Callable[[Run], None] = lambda run: None
        """Called when versions of another run are served."""

    async def find_run(self, board: Board) -> Run:
        """Wait until the wanted run is on the board. Raises UsageError for an unusable board."""
        while True:
            self._wake.clear()
            try:
                run = await self._worker.run(self._current.first, board)
                self._num_faults = 0
                self._status.run = run.name
                return run
            except RunNotFoundError as error:
                waiting = "" if self._config.run is None else "waiting for the run: "
                self._status.move(ReplicaState.BOOTING, f"{waiting}{error}")
                await self._pause(self._config.poll_interval_s)
            except StoreError as error:
                await self._fault(error)

    def ask_reprove(self) -> None:
        """The watchdog saw another engine process or label: nothing is claimed until proven."""
        self._reprove = True
        self._status.caught_up = False
        self._wake.set()

    async def run_forever(self, run: Run, committer: Committer) -> None:
        """Prove, catch up, serve. Raises FatalError (or UsageError while proving)."""
        prover = Prover(
            self._status,
            committer,
            self._worker,
            model=self._config.model,
            scratch=self._config.scratch,
            threads=self._config.threads,
            busy_budget_s=self._config.engine_timeout_s,
        )
        while True:
            self._reprove = False
            run = await self._follow(run, await self._proven(prover, run), committer)

    async def _proven(self, prover: Prover, run: Run) -> Mirror:
        while True:
            self._status.applied, self._status.caught_up = None, False
            try:
                mirror = await prover.prove(run)
                self._num_faults = 0
                return mirror
            except (FatalError, UsageError):
                raise
            except StitchError as error:
                await self._fault(error)

    async def _follow(self, run: Run, mirror: Mirror, committer: Committer) -> Run:
        """Keep the engine on the newest version until it must be proven anew.

        Returns the run that is followed then, which is another one if the board's current run is.
        """
        self._status.move(ReplicaState.CATCHING_UP, "looking at the board")
        while not self._reprove:
            woken = self._wake.is_set() or not self._status.caught_up
            self._wake.clear()
            try:
                looked = self._current.is_due(woken)
                if looked:
                    run = await self._worker.run(self._current.after, run)
                switches = mirror.ref is not None and mirror.ref.run != run.name
                if switches:
                    mirror = await self._switch(run, mirror, committer)
                if woken or switches or not looked:
                    await self._look(run)
                    await self._step(run, mirror, committer)
            except FatalError:
                raise
            except EngineRestartedError as error:
                self._status.note_error(error)
                self.ask_reprove()
                continue
            except StitchError as error:
                served = (self._status.run, self._status.applied)
                moved = mirror.ref is None or (mirror.ref.run, mirror.ref.version) != served
                if moved or self._status.in_doubt is not None:
                    self.ask_reprove()  # the mirror may not be what the engine holds
                await self._fault(error)
                continue
            self._num_faults = 0
            await self._pause(self._config.poll_interval_s)
        return run

    async def _switch(self, run: Run, mirror: Mirror, committer: Committer) -> Mirror:
        """Bring the engine to another run in one transaction; returns the mirror that follows."""
        here, digests = mirror.ref, mirror.digests
        assert here is not None
        busy = ReplicaState.FETCHING if self._status.caught_up else ReplicaState.CATCHING_UP
        self._status.move(busy, f"going over from {here} to run {run.name}")
        started_s = time.monotonic()
        self._fetched_bytes = 0
        try:
            transfer = await self._worker.run(self._switcher.prepare, run, mirror)
        except StitchError as error:
            self._status.blocked = f"run {run.name}: {describe_error(error)}"
            raise
        fetch_s = time.monotonic() - started_s
        there = transfer.mirror.ref
        assert there is not None
        try:
            done = await committer.apply(here, there, transfer.update, transfer.mirror.digests)
        except FatalError:
            raise
        except StitchError:
            self._metrics.commits.add(1.0, "failed")
            if transfer.mirror is mirror:
                await self._worker.run(mirror.undo, transfer.update, here, digests)
            raise
        self._status.blocked = ""
        log.warning("event=run_switched from=%s to=%s", here, there)
        self.on_run(run)
        await self._record(run, here, there, done, fetch_s)
        return transfer.mirror

    async def _look(self, run: Run) -> None:
        """See which version is the newest; no oftener than the board can be asked to bear."""
        wait_s = self._looked_s + MIN_LOOK_INTERVAL_S - time.monotonic()
        if wait_s > 0:  # wake-ups come as often as clients ask
            await asyncio.sleep(wait_s)
        self._looked_s = time.monotonic()
        after = self._status.newest
        if after is None:
            after = self._status.applied
        try:
            self._status.newest = await self._worker.run(run.newest, after)
        except StitchError:
            self._metrics.polls.add(1.0, "failed")
            raise
        self._metrics.polls.add(1.0, "ok")

    async def _step(self, run: Run, mirror: Mirror, committer: Committer) -> None:
        """One transaction if there is something new."""
        status = self._status
        here, digests = mirror.ref, mirror.digests
        assert here is not None
        newest = status.newest or 0
        if newest > here.version:
            busy = ReplicaState.FETCHING if status.caught_up else ReplicaState.CATCHING_UP
            status.move(busy, f"fetching version {newest}")
            started_s = time.monotonic()
            update, fault = await self._advance(run, mirror, newest)
            fetch_s = time.monotonic() - started_s
            if mirror.ref is not None and mirror.ref != here:
                try:
                    done = await committer.apply(here, mirror.ref, update, mirror.digests)
                except FatalError:
                    raise
                except StitchError as error:
                    self._metrics.commits.add(1.0, "failed")
                    await self._worker.run(mirror.undo, update, here, digests)
                    raise error
                await self._record(run, here, mirror.ref, done, fetch_s)
            if fault is not None:
                self._blocked(fault)
                raise fault
        self._serving(run)

    async def _advance(
        self, run: Run, mirror: Mirror, newest: int
    ) -> tuple[UpdateSet, AdvanceError | None]:
        """Bring the mirror as far as it goes, folding in versions that appear meanwhile."""
        updates: list[UpdateSet] = []
        self._fetched_bytes = 0
        fault: AdvanceError | None = None
        for _ in range(MAX_COALESCE_ROUNDS):
            try:
                updates.append(await self._move(run, mirror, newest))
                assert mirror.ref is not None
                self._status.newest = await self._worker.run(run.newest, mirror.ref.version)
            except AdvanceError as error:
                updates.append(error.partial)
                fault = error
                if isinstance(error.fault, NoRouteError):
                    fault = await self._creep(run, mirror, newest, updates, error)
                break
            except StitchError as error:  # of the look for a newer one: what is here is good
                self._status.note_error(error)
                break
            if self._status.newest <= mirror.ref.version:
                break
            newest = self._status.newest
        if len(updates) == 1:
            return updates[0], fault
        return await self._worker.run(UpdateSet.compose, updates), fault

    async def _creep(
        self,
        run: Run,
        mirror: Mirror,
        newest: int,
        updates: list[UpdateSet],
        fault: AdvanceError,
    ) -> AdvanceError:
        """No route leads all the way: go version by version to where they end."""
        while mirror.ref is not None and mirror.ref.version + 1 < newest:
            if self._worker.stopping():
                break
            try:
                updates.append(await self._move(run, mirror, mirror.ref.version + 1))
            except AdvanceError as error:
                updates.append(error.partial)
                return error
        return fault

    async def _move(self, run: Run, mirror: Mirror, target: int) -> UpdateSet:
        return await self._worker.run(
            mirror.advance,
            run,
            target,
            scratch=self._config.scratch,
            progress=self._progress(),
            stop=self._worker.stopping,
            threads=self._config.threads,
        )

    def _progress(self) -> Callable[[int, int], None]:
        """Counts fetched bytes; called in the worker thread after each step."""
        before = self._fetched_bytes

        def progress(done: int, total: int) -> None:
            self._fetched_bytes = before + done
            failpoints.reach("replica.decoded")

        return progress

    async def _record(
        self, run: Run, here: VersionRef, there: VersionRef, done: Committed, fetch_s: float
    ) -> None:
        served_s = time.time()
        try:
            published_s = await self._worker.run(_created_unix_s, run, there.version)
        except StitchError as error:  # the version is served all the same
            log.warning("event=manifest_unread version=%d error=%s", there.version, error)
            published_s = served_s
        timing = CommitTiming(
            version=there.version,
            from_version=here.version,
            num_changed=done.receipt.num_changed,
            fetch_s=fetch_s,
            stage_s=done.stage_s,
            pause_ms=done.receipt.pause_ms,
            bytes_fetched=self._fetched_bytes,
            published_unix_s=published_s,
            served_unix_s=served_s,
        )
        self._status.commits.append(timing)
        metrics = self._metrics
        metrics.commits.add(1.0, "ok")
        metrics.bytes_fetched.add(self._fetched_bytes)
        metrics.pause_ms.observe(timing.pause_ms)
        metrics.publish_to_served_s.observe(max(0.0, served_s - published_s))
        log.info(
            "event=committed version=%d from=%d changed=%d fetch_s=%.3f stage_s=%.3f pause_ms=%.2f",
            timing.version, timing.from_version, timing.num_changed, fetch_s, done.stage_s,
            timing.pause_ms,
        )  # fmt: skip

    def _blocked(self, fault: AdvanceError) -> None:
        """No way past a version: say which and why, and serve what is proven."""
        self._status.blocked = f"version {fault.ref.version + 1}: {describe_error(fault.fault)}"
        if not isinstance(fault.__cause__, StoreError):  # trying again soon may well not help
            self._caught_up()

    def _serving(self, run: Run) -> None:
        status = self._status
        if self._caught_up():
            if (refusal := run.refusal) is not None:  # a version that nobody who is trusted signed
                status.blocked = f"version {(status.applied or 0) + 1}: {describe_error(refusal)}"
                raise refusal
            status.blocked = ""
            status.move(ReplicaState.SERVING)

    def _caught_up(self) -> bool:
        """Open for requests, unless the engine turned out to be another meanwhile."""
        self._status.caught_up = not self._reprove
        return self._status.caught_up

    async def _fault(self, error: StitchError) -> None:
        """Note what went wrong and wait, longer each time; a wake-up shortens the wait."""
        status = self._status
        status.note_error(error)
        status.move(ReplicaState.ERROR, status.blocked or status.last_error)
        log.warning("event=fault state=ERROR error=%s", status.last_error)
        self._num_faults += 1
        wait_s = self._config.poll_interval_s * 2.0 ** min(self._num_faults - 1, 16)
        wait_s = min(wait_s, self._config.max_backoff_s) * random.uniform(0.75, 1.25)
        await asyncio.sleep(min(MIN_RETRY_S, wait_s))
        if not self._reprove:  # proving anew does not wait for what the fault was about
            self._wake.clear()
            await self._pause(wait_s - MIN_RETRY_S)

    async def _pause(self, seconds_s: float) -> None:
        """Wait, at most until woken."""
        if seconds_s > 0:
            try:
                await asyncio.wait_for(self._wake.wait(), seconds_s)
            except TimeoutError:
                return


def _created_unix_s(run: Run, version: int) -> float:
    """When a version was published; of version 0, when its run was created."""
    return run.manifest(version).created_unix_s if version else run.record.created_unix_s
