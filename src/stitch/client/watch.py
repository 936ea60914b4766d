"""Reads the replicas' heartbeats from the board; of the run that is current, if none is named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from stitch.errors import StitchError
from stitch.records import EpochRecord, Heartbeat

log = logging.getLogger(__name__)
MIN_PAUSE_S = 0.05
"""However many requests fail, the board is not read more often than this."""


class WatchedRun(Protocol):
    """The part of a run that a client reads."""

    name: str

    def heartbeats(self) -> list[Heartbeat]: ...


class WatchedBoard(Protocol):
    """The part of a board that a client reads."""

    def open_run(self, name: str) -> WatchedRun: ...

    def current_epoch(self, after: int = 0) -> EpochRecord | None: ...


def open_watched(board: WatchedBoard | str | Path) -> WatchedBoard:
    """A board by its address, or the board itself."""
    if isinstance(board, str | Path):
        from stitch.board import open_board

        return open_board(board, create=False)
    return board


class HeartbeatReader:
    """Synchronous reading; used from one thread at a time."""

    def __init__(self, board: WatchedBoard, run: str | None) -> None:
        self._board = board
        self._follow = run is None
        self._epoch = 0
        self._run = None if run is None else board.open_run(run)

    def read(self) -> list[Heartbeat]:
        """All heartbeats of the run; none while the board has no current run yet."""
        if self._follow:
            epoch = self._board.current_epoch(self._epoch)
            if epoch is not None and epoch.epoch > self._epoch:
                if self._run is None or self._run.name != epoch.run:
                    self._run = self._board.open_run(epoch.run)
                self._epoch = epoch.epoch
        return [] if self._run is None else self._run.heartbeats()

    @property
    def run_name(self) -> str | None:
        return None if self._run is None else self._run.name


class Watch:
    """Reads heartbeats every `refresh_s`, and at once when asked, on the client's event loop."""

    def __init__(
        self,
        reader: HeartbeatReader,
        executor: Executor,
        refresh_s: float,
        observed: Callable[[list[Heartbeat]], None],
        troubled: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._executor = executor
        self._refresh_s = refresh_s
        self._observed = observed
        self._troubled = troubled
        self._wanted = asyncio.Event()
        self._trouble = ""

    def refresh_now(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled. What the board raises is told and logged once, then tried again."""
        while True:
            self._wanted.clear()
            await self.refresh()
            await asyncio.sleep(MIN_PAUSE_S)
            try:
                async with asyncio.timeout(self._refresh_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def refresh(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            beats = await loop.run_in_executor(self._executor, self._reader.read)
        except (StitchError, OSError) as error:
            self._note(f"the board cannot be read: {error}")
            return
        self._note("" if self._reader.run_name else "the board has no current run yet")
        self._observed(beats)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("event=heartbeats_unread reason=%s", trouble)
        self._trouble = trouble
        self._troubled(trouble)
