"""Copying a board: its runs, then the epochs that name them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stitch.board import keys
from stitch.board.copying.objects import Carrier, Copied, Progress
from stitch.board.copying.runs import RunCopier
from stitch.board.sequence import last_in_sequence
from stitch.errors import CopyConflictError, UsageError
from stitch.types import MAX_VERSION

if TYPE_CHECKING:
    from stitch.board.board import Board

log = logging.getLogger("stitch.board")

News = Literal["nothing", "versions", "epoch"]

EPOCH_EVERY = 5
"""Of so many looks at an idle board one is for a new epoch, the others for the next version."""


class BoardCopier:
    """Copies all runs of a board, or one, to another board. Used by one thread.

    Any number of copiers may work on the same boards, and any of them may be killed at any time.
    """

    def __init__(
        self,
        source: Board,
        target: Board,
        *,
        run: str | None = None,
        scratch: Path | None = None,
        progress: Progress | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if source.url == target.url:
            raise UsageError(f"{source.url} cannot be copied to itself")
        if source.signed is not None or target.signed is not None:
            raise UsageError(
                "records are copied with the signatures that they have, which boards that were "
                "opened with keys take off: open both boards without keys"
            )
        self._source = source
        self._target = target
        self._only = run
        self._carrier = Carrier(source, target, scratch=scratch, progress=progress, stop=stop)
        self._stop = stop
        self._runs: dict[str, RunCopier] = {}
        self._epoch = 0
        """The highest epoch that was copied."""
        self._source_epoch = 0
        self._current: RunCopier | None = None
        """The run that is being published into, as far as is known."""
        self._num_looks = 0

    def copy(self) -> Copied:
        """Bring over all that the target lacks.

        Raises CopyConflictError if the target holds something else than the source under a key,
        RunNotFoundError if the run that was named does not exist, and what the stores raise; what
        was copied by then stays and counts.
        """
        done = Copied()
        epoch = self._newest_epoch()
        names = self._source.runs() if self._only is None else [self._only]
        for name in names:
            if self._stop():
                return done
            done.add(self._copier(name).copy())
        if not self._stop():
            done.epochs = self._copy_epochs(epoch)
            self._follow_current()
        return done

    def copy_versions(self) -> Copied:
        """Bring over the new versions of the run that is being published into, nothing else."""
        return Copied() if self._current is None else self._current.copy(extras=False)

    def look(self) -> News:
        """See, with one request, whether the source has something new.

        Only the current run can grow, and only a new epoch changes which one that is. Merged
        patches and anchors are not looked for.
        """
        self._num_looks += 1
        if self._current is None or self._num_looks % EPOCH_EVERY == 0:
            return "epoch" if self._newest_epoch() > self._epoch else "nothing"
        return "versions" if self._current.has_next() else "nothing"

    def _copier(self, name: str) -> RunCopier:
        if name not in self._runs:
            run = self._source.open_run(name)
            self._runs[name] = RunCopier(run, self._target, self._carrier, self._stop)
        return self._runs[name]

    def _follow_current(self) -> None:
        if self._only is not None:
            self._current = self._copier(self._only)
            return
        epoch = self._source.current_epoch(self._source_epoch)
        self._current = None if epoch is None else self._runs.get(epoch.run)

    # --- epochs --------------------------------------------------------------------------------

    def _newest_epoch(self) -> int:
        """The highest epoch of the source, damaged ones included; one request if it is known."""

        def exists(number: int) -> bool:
            return self._source.store.head(keys.epoch(number)) is not None

        self._source_epoch = last_in_sequence(exists, self._source_epoch, limit=MAX_VERSION)
        return self._source_epoch

    def _copy_epochs(self, newest: int) -> int:
        """Copy epochs up to `newest`, in order; how many were created on the target."""
        first = self._epoch
        if first == 0:
            ours = self._target.current_epoch()
            first = 0 if ours is None else min(ours.epoch - 1, newest)
            if ours is not None and ours.epoch > self._newest_epoch():
                raise CopyConflictError(
                    f"{self._target.url} has epoch {ours.epoch}, begun by {ours.writer!r}, which "
                    f"{self._source.url} does not have: somebody else publishes there"
                )
        num_new = 0
        for number in range(first + 1, newest + 1):
            key = keys.epoch(number)
            is_new = self._target.store.head(key) is None
            self._carrier.create(key, self._carrier.expected_record(key))
            self._epoch = number
            num_new += is_new
        return num_new
