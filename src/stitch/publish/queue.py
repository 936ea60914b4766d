"""Snapshots between the caller's thread and the worker's: who waits, and in which buffer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from stitch.errors import FatalError, PublisherClosedError
from stitch.publish.buffers import BufferPool
from stitch.publish.settings import WhenBusy
from stitch.publish.ticket import Ticket
from stitch.tensors import HostWeights
from stitch.types import PatchStats, Schema, VersionRef


@dataclass(kw_only=True)
class Job:
    """A snapshot on its way, and everybody who waits for it (the newest ticket first)."""

    buffer: HostWeights
    step: int | None
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A buffer to take a snapshot into, and the waiting job whose buffer it is, if it is one."""

    buffer: HostWeights
    replaced: Job | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version that exists, and the buffer that its publication set free."""

    ref: VersionRef
    stats: PatchStats
    freed: HostWeights


class SnapshotQueue:
    """One job under way, at most one that waits, and the buffers. Thread-safe.

    The worker is busy from the moment a job is accepted until `rest_or_go_on` finds none waiting.
    Callers of `claim` take turns: each ends with `accept` or `put_back` before the next claims.
    """

    def __init__(self, run: str, schema: Schema, when_busy: WhenBusy) -> None:
        self._run = run
        self._when_busy = when_busy
        self._pool = BufferPool(schema)
        self._changed = threading.Condition()
        self._active: Job | None = None
        self._waiting: Job | None = None
        self._busy = False
        self._num_lent = 0
        self._failed: list[Ticket] = []
        self._dead: FatalError | None = None
        self._closed = False
        self._stopped = False

    # --- the caller's thread -------------------------------------------------------------------

    def claim(self, *, may_replace: bool) -> Slot:
        """A buffer to write to; `may_replace`: that of a waiting job will do if none is free.

        Raises PublisherClosedError, with the cause if the publisher failed for good.
        """
        with self._changed:
            self._check_open()
            buffer = self._pool.take()
            while buffer is None and self._when_busy == "block" and not self._num_lent:
                self._changed.wait()
                self._check_open()
                buffer = self._pool.take()
            if buffer is not None:
                return Slot(buffer=buffer)
            if may_replace and self._waiting is not None:
                job, self._waiting = self._waiting, None
                return Slot(buffer=job.buffer, replaced=job)
            if self._num_lent:
                self._num_lent -= 1  # one more is made in its place
        return Slot(buffer=self._pool.allocate())

    def put_back(self, slot: Slot, error: BaseException) -> None:
        """Give a slot up because its snapshot failed with `error`."""
        with self._changed:
            if slot.replaced is not None:
                self._end_badly(slot.replaced, error)
            self._give(slot.buffer)

    def accept(self, slot: Slot, step: int | None) -> Ticket:
        """Take over a snapshot that `slot` holds now. A job that waits so far is superseded."""
        with self._changed:
            if self._dead is not None:
                if slot.replaced is not None:
                    self._end_badly(slot.replaced, self._closed_by(self._dead))
                self._give(slot.buffer)
                self._check_open()
            ticket = Ticket(step)
            job = Job(buffer=slot.buffer, step=step, tickets=[ticket])
            for older in self._superseded(slot):
                older._mark_coalesced()
                job.tickets.append(older)
            if self._busy:
                self._waiting = job
            else:
                self._active, self._busy = job, True
            self._changed.notify_all()
            return ticket

    def _superseded(self, slot: Slot) -> list[Ticket]:
        if slot.replaced is not None:
            return slot.replaced.tickets
        job, self._waiting = self._waiting, None
        if job is None:
            return []
        self._pool.give(job.buffer)
        return job.tickets

    def wait_idle(self, timeout_s: float | None) -> None:
        """Return once nothing is under way or waits; TimeoutError says what still does."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                jobs = [job for job in (self._active, self._waiting) if job is not None]
                steps = [t.step for job in jobs for t in job.tickets if not t.done]
                raise TimeoutError(
                    f"after {timeout_s:.3g} s {len(steps)} accepted snapshots of run {self._run!r} "
                    f"are not published (trainer steps {steps})"
                )

    def take_unnoticed(self) -> list[BaseException]:
        """Failures of tickets that nobody waited for; each is given out once."""
        with self._changed:
            failed, self._failed = self._failed, []
        return [e for ticket in failed if (e := ticket._unnoticed_error()) is not None]

    def close(self) -> None:
        """Let no one claim any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Let `next_job` return None once nothing is under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # --- the worker's thread -------------------------------------------------------------------

    def next_job(self) -> Job | None:
        """Wait for a job; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._active is not None or self._stopped)
            return self._active

    def settle(self, job: Job, outcome: Published | Exception, *, is_lent: bool = False) -> None:
        """End the job's tickets; after a FatalError also the waiting ones, and accept no more.

        `is_lent`: somebody still reads the buffer that was freed, and will `return_lent` it.
        """
        with self._changed:
            if isinstance(outcome, Published):
                for ticket in job.tickets:
                    ticket._end(ref=outcome.ref, stats=outcome.stats)
                if is_lent:
                    self._num_lent += 1
                else:
                    self._pool.give(outcome.freed)
            else:
                self._end_badly(job, outcome)
                self._pool.give(job.buffer)
                if isinstance(outcome, FatalError):
                    self._die(outcome)
            self._changed.notify_all()

    def return_lent(self, buffer: HostWeights) -> None:
        """Take back a buffer that was lent, unless another one took its place meanwhile."""
        with self._changed:
            if self._num_lent:
                self._num_lent -= 1
                self._give(buffer)

    def rest_or_go_on(self) -> None:
        """The settled job's aftermath is over too: make the waiting job the active one."""
        with self._changed:
            self._active, self._waiting = self._waiting, None
            self._busy = self._active is not None
            if not self._busy:
                self._pool.trim()
            self._changed.notify_all()

    # --- both, holding the lock ----------------------------------------------------------------

    def _check_open(self) -> None:
        if self._dead is not None:
            raise self._closed_by(self._dead)
        if self._closed:
            raise PublisherClosedError(f"the publisher of run {self._run!r} is closed")

    def _closed_by(self, cause: FatalError) -> PublisherClosedError:
        error = PublisherClosedError(
            f"the publisher of run {self._run!r} failed for good, nothing more is published: "
            f"{type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return error

    def _die(self, cause: FatalError) -> None:
        self._dead = cause
        if self._waiting is not None:
            self._end_badly(self._waiting, self._closed_by(cause))
            self._pool.give(self._waiting.buffer)
            self._waiting = None

    def _end_badly(self, job: Job, error: BaseException) -> None:
        for ticket in job.tickets:
            ticket._end(error=error)
        self._failed.extend(job.tickets)

    def _give(self, buffer: HostWeights) -> None:
        self._pool.give(buffer)
        if not self._busy:
            self._pool.trim()
        self._changed.notify_all()
