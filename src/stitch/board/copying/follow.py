"""Going on with a copy for as long as it is wanted."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stitch.board.copying.objects import Copied, CopyStoppedError
from stitch.errors import RetryableError, RunNotFoundError

if TYPE_CHECKING:
    from stitch.board.copying.boards import BoardCopier

log = logging.getLogger("stitch.board")

MAX_WAIT_S = 60.0
"""Longest wait after faults."""
FIRST_SWEEP_S, MAX_SWEEP_S = 30.0, 3600.0
"""Time from one round over everything to the next: the first after news, doubling without any."""


def follow(
    copier: BoardCopier,
    stopped: threading.Event,
    *,
    interval_s: float,
    on_copied: Callable[[Copied], None] = lambda copied: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Copy until `stopped` is set, looking for news every `interval_s` seconds, about.

    A look costs one request. Rounds over everything, which list both boards and so find merged
    patches and anchors, come after news, and ever more seldom without. What may pass by itself (a
    store that does not answer, a run that is not there yet) is logged and tried again with growing
    waits; all else is raised.
    """
    schedule = _Schedule(clock)
    num_faults = 0
    while not stopped.is_set():
        try:
            copied = _round(copier, schedule)
            num_faults = 0
        except CopyStoppedError:
            return
        except (RetryableError, RunNotFoundError) as error:
            num_faults += 1
            log.warning("event=copy_failed faults=%d error=%s", num_faults, error)
        else:
            if copied is not None:
                on_copied(copied)
        wait_s = min(MAX_WAIT_S, interval_s * 2.0 ** min(num_faults, 16))
        stopped.wait(max(interval_s, wait_s) * random.uniform(0.75, 1.25))


class _Schedule:
    """When the next round over everything is due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = FIRST_SWEEP_S
        self._due_s = clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due_s

    def swept(self, *, is_news: bool) -> None:
        self._pause_s = FIRST_SWEEP_S if is_news else min(MAX_SWEEP_S, 2 * self._pause_s)
        self._due_s = self._clock() + self._pause_s

    def saw_news(self) -> None:
        """Something was published: merged patches and anchors may follow."""
        self._pause_s = FIRST_SWEEP_S
        self._due_s = min(self._due_s, self._clock() + FIRST_SWEEP_S)


def _round(copier: BoardCopier, schedule: _Schedule) -> Copied | None:
    if not schedule.is_due:
        news = copier.look()
        if news == "nothing":
            return None
        if news == "versions":
            schedule.saw_news()
            return copier.copy_versions()
    copied = copier.copy()
    schedule.swept(is_news=copied.is_news)
    return copied
