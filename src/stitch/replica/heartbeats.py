"""Telling the board how this replica is: on every change of state and at a steady rate."""

from __future__ import annotations

import asyncio
import logging
import time

from stitch.board import Run
from stitch.errors import StitchError
from stitch.records import FORMAT, Heartbeat
from stitch.replica.state import ReplicaStatus
from stitch.replica.worker import Worker

log = logging.getLogger("stitch.replica.heartbeats")

MIN_INTERVAL_S = 0.2
"""Changes closer together than this share a heartbeat."""


class HeartbeatWriter:
    """Writes `replicas/<id>.json`. A beat that fails is logged and the next one tried in time.

    One thread does it, so that a beat on its way when the replica stops cannot land after the last
    one, or after the file was removed.
    """

    def __init__(
        self, run: Run, status: ReplicaStatus, *, url: str, region: str, interval_s: float
    ) -> None:
        self._run = run
        self._left: list[Run] = []
        self._status = status
        self._url = url
        self._region = region
        self._interval_s = interval_s
        self._seq = 0
        self._worker = Worker("stitch-heartbeat")
        self._changed = asyncio.Event()
        status.listeners.append(self._changed.set)

    def follow(self, run: Run) -> None:
        """Write under another run from now on, and take the replica off the one before."""
        self._left = [left for left in (*self._left, self._run) if left.name != run.name]
        self._run = run
        self._changed.set()

    async def beat_forever(self) -> None:
        while True:
            self._changed.clear()
            await self.beat()
            await asyncio.sleep(min(MIN_INTERVAL_S, self._interval_s))
            try:
                wait_s = max(0.001, self._interval_s - MIN_INTERVAL_S)
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """Write one heartbeat."""
        self._seq += 1
        try:
            await self._worker.run(self._run.put_heartbeat, self._now())
            while self._left:  # after the new one, so that the replica is always somewhere
                left = self._left[0]
                await self._worker.run(self._remove_own, left)
                self._left = [run for run in self._left if run is not left]
        except StitchError as error:
            log.warning("event=heartbeat_failed seq=%d error=%s", self._seq, error)

    async def remove(self) -> None:
        """Take the replica off the board; it stopped in good order."""
        try:
            for run in [*self._left, self._run]:
                await self._worker.run(self._remove_own, run)
        except StitchError as error:
            log.warning("event=heartbeat_not_removed error=%s", error)

    def _remove_own(self, run: Run) -> None:
        """Delete the heartbeat, unless another process writes under this id by now."""
        status = self._status
        found = [beat for beat in run.heartbeats() if beat.replica == status.replica]
        if found and found[0].boot != status.boot:
            log.warning(
                "event=heartbeat_of_another replica=%s boot=%s ours=%s url=%s",
                status.replica, found[0].boot, status.boot, found[0].url,
            )  # fmt: skip
            return
        run.delete_heartbeat(status.replica)

    def _now(self) -> Heartbeat:
        status = self._status
        return Heartbeat(
            format=FORMAT,
            replica=status.replica,
            run=status.run,
            url=self._url,
            region=self._region,
            state=status.state,
            applied=status.applied,
            newest_seen=status.newest,
            ready=status.ready,
            reason=status.reason,
            last_error=status.last_error,
            boot=status.boot,
            seq=self._seq,
            sent_unix_s=time.time(),
            versions=tuple(timing.to_json() for timing in status.commits),
        )
