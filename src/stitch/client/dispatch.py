"""Carry one request to some replica, and to the next one, until an answer or the deadline.

What is tried again, and where:

- 409 (version not met), 503 and 429: elsewhere; at the same replica not before its Retry-After.
- Connection errors, 502, 504, a broken body, an attempt's time-out: elsewhere. These may have
  reached the engine; a generation request is harmless to repeat as long as the caller has seen
  none of its output, so this is done unless the request is marked `idempotent=False`.
- 500 and other 5xx: at one other replica, then it is the request's fault: RequestFailedError.
- Any other status: RequestFailedError at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stitch.client.fleet import Fleet, Member
from stitch.client.request import AttemptFailed, Request
from stitch.errors import NoReplicaError, RequestFailedError

T = TypeVar("T")
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
MAX_ENGINE_ERRORS = 2
Attempt = Callable[[Member, float, int], Awaitable[T]]
"""(replica, seconds left, number of this attempt) -> what the request is for."""


class Dispatcher:
    """Runs attempts on the client's event loop; `changed` wakes those who wait for a replica."""

    def __init__(self, fleet: Fleet, *, refresh_now: Callable[[], None]) -> None:
        self.fleet = fleet
        self._refresh_now = refresh_now
        self._changed = asyncio.Event()
        self._attempts: dict[str, set[asyncio.Task[object]]] = {}
        self.trouble = ""
        """Why the list of replicas may be incomplete; part of a NoReplicaError."""

    def fleet_changed(self, lost: list[str]) -> None:
        """Wake the waiting; give up attempts at lost replicas if there is another to ask."""
        self._changed.set()
        self._changed = asyncio.Event()
        for replica in lost:
            if self.fleet.has_other_alive(replica):
                for task in self._attempts.get(replica, ()):
                    task.cancel("lost")

    async def deliver(self, request: Request, attempt: Attempt[T]) -> T:
        """Try until an attempt returns. Raises NoReplicaError or RequestFailedError."""
        ends = time.monotonic() + request.deadline_s
        tries = _Tries()
        while (left_s := ends - time.monotonic()) > 0:
            changed = self._changed
            member = self.fleet.choose(request.constraint, tries.held(self.fleet, request))
            if member is None:
                if tries.last_unmet and self.fleet.all_past(request.constraint):
                    break
                await _wait(changed, min(left_s, tries.next_hold_s()))
                continue
            tries.count += 1
            try:
                return await self._run(attempt, member, left_s, tries.count)
            except AttemptFailed as failure:
                tries.note(member, failure)
                self._after_failure(request, tries, failure)
        raise NoReplicaError(_no_replica(request, self.fleet, tries, self.trouble))

    def _after_failure(self, request: Request, tries: _Tries, failure: AttemptFailed) -> None:
        if failure.answered_error and tries.engine_errors >= MAX_ENGINE_ERRORS:
            raise RequestFailedError(f"{request.path} failed at every replica asked: {failure}")
        if failure.may_have_run and not request.idempotent:
            raise NoReplicaError(
                f"{request.path} may or may not have run, and it is not to be repeated: {failure}"
            )
        self._refresh_now()

    async def _run(self, attempt: Attempt[T], member: Member, left_s: float, number: int) -> T:
        """One attempt, in a task of its own that losing the replica cancels.

        It is outstanding from here, before anything else can run: requests that choose their
        replicas in the same turn of the event loop must see each other.
        """
        started_s = self.fleet.started(member)
        task: asyncio.Task[T] = asyncio.ensure_future(attempt(member, left_s, number))
        group = self._attempts.setdefault(member.id, set())
        group.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                self.fleet.failed(member, started_s)
                raise AttemptFailed("its heartbeat stood still", may_have_run=True)
            return task.result()
        finally:
            self.fleet.ended(member)
            group.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # counts as seen, also when this coroutine was cancelled


class _Tries:
    """What one request has met so far."""

    def __init__(self) -> None:
        self.count = 0
        self.engine_errors = 0
        self.last_unmet = False
        self._until_s: dict[str, float] = {}
        self._failures: dict[str, AttemptFailed] = {}
        self._said: dict[str, str] = {}
        self._last_said: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._boots: dict[str, str] = {}

    def note(self, member: Member, failure: AttemptFailed) -> None:
        """Do not ask this replica again for a while: its Retry-After, else a growing pause."""
        count = self._counts[member.id] = self._counts.get(member.id, 0) + 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (count - 1))
        if failure.retry_after_s is not None:
            pause_s = max(failure.retry_after_s, 0.5 * FIRST_PAUSE_S)
        self._until_s[member.id] = time.monotonic() + pause_s * random.uniform(1.0, 1.25)
        said = str(failure)
        if failure.timed_out and member.id in self._said:
            said += f" (before that: {self._said[member.id]})"
        else:
            self._said[member.id] = said
        self._failures[member.id] = failure
        self._last_said[member.id] = said
        self._boots[member.id] = member.beat.boot
        self.engine_errors += failure.answered_error
        self.last_unmet = failure.unmet
        member.last_answer = str(failure)

    def held(self, fleet: Fleet, request: Request) -> set[str]:
        """Replicas not to ask now. News of a replica (restarted, now on the version) frees it."""
        now = time.monotonic()
        by_id = {m.id: m for m in fleet.members}
        held = set()
        for replica, until in self._until_s.items():
            member = by_id.get(replica)
            if member is None or now >= until or member.beat.boot != self._boots[replica]:
                continue
            met = request.constraint.unmet_by(member.applied, member.beat.run) is None
            if not (self._failures[replica].unmet and met):
                held.add(replica)
        return held

    def next_hold_s(self) -> float:
        now = time.monotonic()
        waits = [until - now for until in self._until_s.values() if until > now]
        return min(waits, default=LONGEST_PAUSE_S)

    def last_answers(self) -> dict[str, str]:
        return dict(self._last_said)


async def _wait(changed: asyncio.Event, span_s: float) -> None:
    try:
        async with asyncio.timeout(max(span_s, 0.001)):
            await changed.wait()
    except TimeoutError:
        pass


def _no_replica(request: Request, fleet: Fleet, tries: _Tries, trouble: str) -> str:
    wanted = ""
    if request.constraint.min_version is not None:
        wanted = f" on version {request.constraint.min_version} or newer"
    elif request.constraint.exact_version is not None:
        wanted = f" on exactly version {request.constraint.exact_version}"
    if request.constraint.run is not None:
        wanted += f" of run {request.constraint.run!r}"
    lines = [f"no replica{wanted} answered {request.path} within {request.deadline_s:g} s"]
    if fleet.all_past(request.constraint):
        lines = [f"no replica{wanted} is left to answer {request.path}: all have passed it"]
    answers = tries.last_answers()
    for member in sorted(fleet.members, key=lambda m: m.id):
        said = answers.pop(member.id, "not asked")
        applied = "none" if member.applied is None else str(member.applied)
        state = "lost" if member.stale else str(member.beat.state)
        reason = f", {member.beat.reason}" if member.beat.reason and not member.beat.ready else ""
        lines.append(f"{member.id} ({state}, version {applied}{reason}): {said}")
    lines.extend(f"{replica} (gone): {said}" for replica, said in sorted(answers.items()))
    if len(lines) == 1:
        lines.append("the board lists no replica")
    if trouble:
        lines.append(trouble)
    return "; ".join(lines)
