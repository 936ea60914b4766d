"""Which run a replica follows: a named one, or that of the board's current epoch."""

from __future__ import annotations

from stitch.board import Board, Run
from stitch.errors import RunNotFoundError

LOOK_EVERY = 5
"""Polls of which one asks for the current run instead of the next version, so that a poll of an
idle board stays one request."""


class CurrentRun:
    """Finds the run, and notices when another one becomes current. Not thread-safe."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._epoch = 0
        self._num_polls = 0

    def first(self, board: Board) -> Run:
        """Raises RunNotFoundError while there is none."""
        run = board.open_run(self._name) if self._name is not None else self._newer(board)
        if run is None:
            raise RunNotFoundError("no run on the board yet")
        return run

    def after(self, run: Run) -> Run:
        """The run to follow now: `run`, unless another one has become current."""
        found = None if self._name is not None else self._newer(run.board)
        return run if found is None or found.name == run.name else found

    def is_due(self, woken: bool) -> bool:
        """Whether this look at the board is to see which run is current."""
        self._num_polls += 1
        return self._name is None and (woken or self._num_polls % LOOK_EVERY == 0)

    def _newer(self, board: Board) -> Run | None:
        epoch = board.current_epoch(self._epoch)
        if epoch is None or epoch.epoch <= self._epoch:
            return None
        run = board.open_run(epoch.run)
        self._epoch = epoch.epoch
        return run
