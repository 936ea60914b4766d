"""Admission: which requests may run on the version that is served now.

Open, the gate costs two comparisons. While a commit is under way it is closed: new requests wait,
so that each is admitted to the old version before it or to the new one after it, never to a label
that is about to change. They wait with a deadline; requests already in the engine go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from stitch.replica.state import ReplicaStatus
from stitch.types import NotReadyReason, VersionConstraint, VersionRef


class NotAdmittedError(Exception):
    """A request that may not run here now; becomes a 409 or 503 answer.

    `reason` is None for a request without constraint (503) and when the gate stayed closed.
    """

    def __init__(self, reason: NotReadyReason | None, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Gate:
    """Admits requests by what `status` says is served. One per replica, on one event loop."""

    def __init__(
        self, status: ReplicaStatus, wake: Callable[[], None], *, max_wait_s: float = 30.0
    ) -> None:
        self._status = status
        self._wake = wake
        self._max_wait_s = max_wait_s
        self._opened: asyncio.Event | None = None  # set while closed, awaited by who waits
        self.num_waiting = 0

    @property
    def is_closed(self) -> bool:
        return self._opened is not None

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """The barrier: closed inside the block, open after it however it ends."""
        assert self._opened is None, "one commit at a time"
        self._opened = asyncio.Event()
        try:
            yield
        finally:
            opened, self._opened = self._opened, None
            opened.set()

    async def admit(self, constraint: VersionConstraint) -> VersionRef:
        """The version the request starts on; raises NotAdmittedError."""
        if self._opened is not None:
            await self._wait_open()
        ref = self._status.ref
        reason = constraint.unmet_by(ref.version, ref.run) if ref else constraint.unmet_by(None)
        if ref is not None and reason is None:
            return ref
        raise self._refusal(constraint, reason)

    async def settled(self) -> None:
        """Wait for a commit under way to end, so that the live version is known; bounded."""
        if self._opened is not None:
            with contextlib.suppress(NotAdmittedError):
                await self._wait_open()

    async def _wait_open(self) -> None:
        """Wait until the gate is open, however many commits follow each other."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                while self._opened is not None:
                    await self._opened.wait()
        except TimeoutError:
            raise NotAdmittedError(
                None, f"a commit has been under way for over {self._max_wait_s:g} s", 1
            ) from None
        finally:
            self.num_waiting -= 1

    def _refusal(
        self, constraint: VersionConstraint, reason: NotReadyReason | None
    ) -> NotAdmittedError:
        status = self._status
        if reason is None:  # nothing asked, or met by nothing: there is nothing to serve yet
            return NotAdmittedError(
                None, f"replica {status.replica} serves nothing yet: {status.reason}", 1
            )
        wanted = f"{'exactly' if constraint.exact_version is not None else 'at least'} version"
        wanted = "any version" if constraint.target is None else f"{wanted} {constraint.target}"
        if constraint.run is not None:
            wanted = f"{wanted} of run {constraint.run!r}"
        if reason is NotReadyReason.OTHER_RUN:
            self._wake()  # the board's current run may have changed
            return NotAdmittedError(reason, f"{wanted} is wanted and {status.ref} is served", 1)
        if reason is NotReadyReason.AHEAD:
            return NotAdmittedError(
                reason, f"{wanted} is wanted and {status.applied} is served already", 1
            )
        self._wake()
        if reason is NotReadyReason.BEHIND and status.blocked:
            reason = NotReadyReason.GAP
        served = "nothing" if status.ref is None else f"version {status.applied}"
        detail = status.blocked or status.reason or status.doing
        message = f"{wanted} is wanted and {served} is served"
        return NotAdmittedError(reason, f"{message}: {detail}" if detail else message, 1)
