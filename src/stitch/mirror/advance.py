"""Moving a mirror along a route: prefetch, retry once, then another route."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.board import AnchorStep, MergedStep, Route, Run, Step, plan_route
from stitch.codec import UpdateSet
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    CorruptCheckpointError,
    CorruptPatchError,
    RetryableError,
    StitchError,
    UnsupportedFormatError,
    VersionNotFoundError,
)
from stitch.mirror.fetch import fetch_parts
from stitch.tensors.reader import Progress
from stitch.types import VersionRef

if TYPE_CHECKING:
    from stitch.mirror.mirror import Mirror

log = logging.getLogger(__name__)

_BAD_STEP = (
    BaseMismatchError,
    CorruptBlobError,
    CorruptCheckpointError,
    CorruptPatchError,
    UnsupportedFormatError,
    VersionNotFoundError,
)
"""What a step raises when the fault is in what the board holds, so that another route may work."""

_FOLD_BYTES = 64 << 20
"""Update sets are composed on the way when the new ones exceed this and the composed one."""


class AdvanceError(RetryableError):
    """A mirror could not reach its target; it stands at the last version it proved.

    The reason is the exception's `__cause__`. `partial` leads from where the mirror stood to `ref`,
    where it stands now (the same, with an empty update set, if no step was taken). `fault` is what
    was wrong with the first step beyond `ref`, where that is known, or else the reason.
    """

    def __init__(
        self, message: str, *, partial: UpdateSet, ref: VersionRef, fault: StitchError
    ) -> None:
        super().__init__(message)
        self.partial = partial
        self.ref = ref
        self.fault = fault


class Advance:
    """One journey of one mirror."""

    def __init__(
        self,
        mirror: Mirror,
        run: Run,
        *,
        scratch: Path | None,
        progress: Progress | None,
        stop: Callable[[], bool] | None,
        threads: int | None,
    ) -> None:
        assert mirror.ref is not None
        self._mirror = mirror
        self._run = run
        self._scratch = scratch
        self._progress = progress
        self._stop = stop or (lambda: False)
        self._threads = threads
        self._start = (mirror.ref, mirror.digests)
        self._avoid: set[str] = set()
        self._last_fault: StitchError | None = None
        self._updates: list[UpdateSet] = []
        self._done_bytes = 0

    def to(self, target: int | None) -> UpdateSet:
        """See Mirror.advance."""
        try:
            self._travel(target)
            return self._composed()
        except StitchError as error:
            raise self._stopped(target, error) from error
        except BaseException:
            self._go_back()
            raise

    @property
    def _here(self) -> VersionRef:
        assert self._mirror.ref is not None
        return self._mirror.ref

    def _travel(self, target: int | None) -> None:
        if target is None:
            target = self._run.newest(after=self._here.version)
        while self._here.version != target and not self._stop():
            route = plan_route(self._run, self._here.version, target, avoid=frozenset(self._avoid))
            with ThreadPoolExecutor(1, thread_name_prefix="stitch-fetch") as pool:
                try:
                    self._follow(route, pool)
                finally:
                    pool.shutdown(cancel_futures=True)

    def _follow(self, route: Route, pool: ThreadPoolExecutor) -> None:
        """Take the route's steps until its end, until told to stop, or until one is bad."""
        total_bytes = self._done_bytes + route.num_bytes
        ahead = self._prefetch(route, 0, pool)
        for index, step in enumerate(route.steps):
            if self._stop():
                return
            parts, ahead = ahead, self._prefetch(route, index + 1, pool)
            if not self._take(step, parts):
                return
            self._done_bytes += step.num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, total_bytes)

    def _prefetch(
        self, route: Route, index: int, pool: ThreadPoolExecutor
    ) -> Future[list[bytes]] | None:
        step = route.steps[index] if index < len(route.steps) else None
        if step is None or isinstance(step, AnchorStep):
            return None
        return pool.submit(fetch_parts, self._run, step.record, self._scratch)

    def _take(self, step: Step, parts: Future[list[bytes]] | None) -> bool:
        """Move over one step, fetching it a second time if it is bad; False: it stays bad."""
        fault: StitchError | None = None
        for attempt in (1, 2):
            try:
                fetched = parts.result() if parts is not None and attempt == 1 else None
                self._add(self._move(step, fetched))
                return True
            except _BAD_STEP as error:
                log.warning(
                    "event=bad_step run=%s at=%d key=%s attempt=%d error=%s",
                    self._run.name, self._here.version, step.key, attempt, error,
                )  # fmt: skip
                fault = error
        self._avoid.add(step.key)
        self._last_fault = fault
        if isinstance(step, MergedStep):
            self._run.forget_merged(step.from_version, step.to_version)
        return False

    def _move(self, step: Step, parts: list[bytes] | None) -> UpdateSet:
        if isinstance(step, AnchorStep):
            return self._mirror.jump(self._run, step.record, self._scratch)
        return self._mirror.step(self._run, step.record, parts, threads=self._threads)

    def _add(self, update: UpdateSet) -> None:
        self._updates.append(update)
        recent_bytes = sum(update.num_bytes for update in self._updates[1:])
        if recent_bytes > max(_FOLD_BYTES, self._updates[0].num_bytes):
            self._updates = [UpdateSet.compose(self._updates)]

    def _composed(self) -> UpdateSet:
        return UpdateSet.compose(self._updates)

    def _stopped(self, target: int | None, error: StitchError) -> AdvanceError:
        fault = self._last_fault or error
        wanted = "the newest version" if target is None else f"version {target}"
        message = f"run {self._run.name!r}: stopped at version {self._here.version} of {wanted}"
        if self._avoid:
            message += f"; not usable: {', '.join(sorted(self._avoid))} ({fault})"
        return AdvanceError(
            f"{message}: {error}", partial=self._composed(), ref=self._here, fault=fault
        )

    def _go_back(self) -> None:
        ref, digests = self._start
        try:
            self._mirror.undo(self._composed(), ref, digests)
        except BaseMismatchError:
            # Interrupted between a step and its record here: what is held has to be proven anew.
            self._mirror.ref = None
