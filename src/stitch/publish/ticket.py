"""The promise that `Publisher.publish` returns."""

from __future__ import annotations

import threading

from stitch.types import PatchStats, VersionRef


class Ticket:
    """What became of one snapshot that a publisher accepted. Thread-safe.

    A ticket ends exactly once: with the version that carries its weights (or newer ones, see
    `coalesced`), or with the error that kept them from being published.
    """

    def __init__(self, step: int | None) -> None:
        self.step = step
        """The trainer's step, as passed to `publish`."""
        self._ended = threading.Event()
        self._coalesced = False
        self._ref: VersionRef | None = None
        self._stats: PatchStats | None = None
        self._error: BaseException | None = None
        self._observed = False

    def wait(self, timeout_s: float | None = None) -> VersionRef:
        """Return the version once its manifest exists, or raise what kept it from existing.

        Raises TimeoutError after `timeout_s`; the publish itself goes on.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"snapshot of step {self.step} not published after {timeout_s} s")
        self._observed = True
        if self._error is not None:
            raise self._error
        assert self._ref is not None
        return self._ref

    @property
    def done(self) -> bool:
        """Whether the ticket ended, well or badly."""
        return self._ended.is_set()

    @property
    def coalesced(self) -> bool:
        """Whether a newer snapshot took this one's place before it was encoded."""
        return self._coalesced

    @property
    def ref(self) -> VersionRef | None:
        """The version, or None while it is not published."""
        return self._ref

    @property
    def stats(self) -> PatchStats | None:
        """What the version's patch changes and costs, or None while it is not published."""
        return self._stats

    @property
    def error(self) -> BaseException | None:
        """Why it failed, or None. Reading it counts as having noticed the failure."""
        self._observed = self._observed or self.done
        return self._error

    def _mark_coalesced(self) -> None:
        self._coalesced = True

    def _end(
        self,
        *,
        ref: VersionRef | None = None,
        stats: PatchStats | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._ref, self._stats, self._error = ref, stats, error
        self._ended.set()

    def _unnoticed_error(self) -> BaseException | None:
        """The failure, if nobody was told of it yet; counts as told from now on."""
        if not self.done or self._observed:
            return None
        self._observed = True
        return self._error
