"""Telling the board how this replica is: on every change of state and at a steady rate."""

from __future__ import annotations

import asyncio
import logging
import time

from stitch.board import Run
from stitch.errors import StitchError
from stitch.records import FORMAT, Heartbeat
from stitch.replica.state import ReplicaStatus

log = logging.getLogger("stitch.replica.heartbeats")

MIN_INTERVAL_S = 0.2
"""Changes closer together than this share a heartbeat."""


class HeartbeatWriter:
    """Writes `replicas/<id>.json`. A beat that fails is logged and the next one tried in time."""

    def __init__(
        self, run: Run, status: ReplicaStatus, *, url: str, region: str, interval_s: float
    ) -> None:
        self._run = run
        self._status = status
        self._url = url
        self._region = region
        self._interval_s = interval_s
        self._seq = 0
        self._changed = asyncio.Event()
        status.listeners.append(self._changed.set)

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
            await asyncio.to_thread(self._run.put_heartbeat, self._now())
        except StitchError as error:
            log.warning("event=heartbeat_failed seq=%d error=%s", self._seq, error)

    async def remove(self) -> None:
        """Take the replica off the board; it stopped in good order."""
        try:
            await asyncio.to_thread(self._run.delete_heartbeat, self._status.replica)
        except StitchError as error:
            log.warning("event=heartbeat_not_removed error=%s", error)

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
