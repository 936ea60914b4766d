"""The publisher: snapshots on the caller's thread, everything else on one worker thread."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stitch.board import Board, Run
from stitch.errors import RunExistsError, StitchError, UsageError
from stitch.failpoints import reach
from stitch.publish.anchoring import AnchorRule, AnchorWriter
from stitch.publish.fence import end_epoch, fence
from stitch.publish.lineage import (
    Lineage,
    as_board,
    check_absent,
    check_same,
    resume_run,
    start_fork,
    start_run,
)
from stitch.publish.merging import BackgroundMerging
from stitch.publish.pipeline import Pipeline
from stitch.publish.queue import Job, Published, SnapshotQueue
from stitch.publish.settings import PublisherSettings
from stitch.publish.snapshot import Snapshot, WeightSource, check_step, shadow_for
from stitch.publish.ticket import Ticket
from stitch.tensors.reader import Progress
from stitch.types import VersionRef, check_run_name

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 60.0
"""How long a publisher that was never closed may hold up the interpreter's exit."""


class Publisher:
    """Publishes a trainer's weights as versions of one run. Thread-safe.

    `publish` returns once the weights are copied; a worker thread diffs the copy against the last
    published version, encodes, uploads and commits. A failed publish costs nothing but time: the
    next one diffs against the same version.

    Memory: the view twice (the last published version and one snapshot) plus a few buckets. While
    publishing overlaps with publishing, "coalesce" needs the view once more, and twice more if the
    source is an iterator, which can fail midway and so may not overwrite a snapshot that waits.
    While an anchor is written and publishing goes on, the view once more.
    With `snapshot="device"` also the view once in the memory of the device that holds the tensors;
    in return only what changed crosses to the host while `publish` blocks.

    Use it as a context manager, or `close` it: that waits until everything accepted is published.
    """

    @classmethod
    def start(
        cls,
        board: Board | str | Path,
        run: str,
        base: str | Path | None = None,
        view: str | None = None,
        *,
        parent: VersionRef | str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Create `run` on the board, with the weights of `base`, or of `parent`, as its version 0.

        `base` is a safetensors file, a checkpoint directory or a Hugging Face hub name, `view` by
        default "bf16". `parent` is a version of another run on the board, "math@7": the run is
        forked from it, with the same view; no weights are copied, and `base` may then say where the
        parent run's base is. `options` are the fields of PublisherSettings. Raises RunExistsError
        if the board has the run (`resume` or `open` it), UsageError or CorruptCheckpointError for
        an unusable base, VersionNotFoundError or LineageError for an unusable parent.
        """
        settings = PublisherSettings.of(options)
        where = as_board(board)
        if parent is not None:
            lineage = start_fork(
                where, run, parent, base, view, progress, settings.threads, settings.scratch
            )
        elif base is not None:
            lineage = start_run(where, run, base, view or "bf16", progress, settings.threads)
        else:
            check_absent(where, check_run_name(run))
            raise UsageError(f"run {run!r} needs a base checkpoint, or a parent to fork it from")
        return cls(lineage, settings)

    @classmethod
    def resume(
        cls,
        board: Board | str | Path,
        run: str,
        base: str | Path | None = None,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Go on with a run after its newest version, whose weights are rebuilt from the board.

        `base` (default: where the run record says) spares fetching an anchor; one that is absent
        or is not the run's base is done without. Begins a new epoch, which stops a publisher that
        still runs. Unless that one is known to be gone, the first thing published is a version that
        changes nothing, and takes the number that it might else still publish (see `ref`). Raises
        RunNotFoundError, LineageError if the newest version cannot be reproduced, and StoreError if
        the store fails meanwhile.
        """
        settings = PublisherSettings.of(options)
        lineage = resume_run(
            as_board(board), run, base, progress, settings.threads, settings.scratch
        )
        return cls(lineage, settings)

    @classmethod
    def open(
        cls,
        board: Board | str | Path,
        run: str,
        base: str | Path | None = None,
        view: str | None = None,
        *,
        parent: VersionRef | str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """`start` the run, or `resume` it, without a base if need be, if the board has it already.

        Raises UsageError if the run exists with another view, or another parent than `parent`.
        """
        where = as_board(board)
        try:
            return cls.start(where, run, base, view, parent=parent, progress=progress, **options)
        except RunExistsError:
            check_same(where, run, view or (None if parent else "bf16"), parent)
            return cls.resume(where, run, base, progress=progress, **options)

    def __init__(self, lineage: Lineage, settings: PublisherSettings) -> None:
        """Use `start`, `resume` or `open`."""
        self._run = lineage.run
        self._pipeline = Pipeline(
            lineage.run,
            lineage.baseline,
            lineage.epoch,
            encoding=settings.encoding,
            decode=settings.decode,
            threads=settings.threads,
            retry=settings.retry,
        )
        fence(self._pipeline)
        self._queue = SnapshotQueue(self._run.name, self._run.schema, settings.when_busy)
        self._anchors = AnchorWriter(
            lineage.run,
            AnchorRule(lineage.run, settings.anchor_every),
            scratch=settings.scratch,
            writer=lineage.epoch.writer,
            give_back=self._queue.return_lent,
        )
        self._shadow = shadow_for(settings.snapshot, self._run.schema)
        self._snapshotting = threading.Lock()
        self._ended = False
        self._pid = os.getpid()
        self._worker = threading.Thread(
            target=self._work, name=f"stitch-publisher-{self._run.name}", daemon=True
        )
        self._worker.start()
        self._merging: BackgroundMerging | None = None
        if settings.merge:
            self._merging = BackgroundMerging(
                lineage.run,
                encoding=settings.encoding,
                decode=settings.decode,
                scratch=settings.scratch,
            )
        atexit.register(self._at_exit)

    @property
    def run(self) -> Run:
        return self._run

    @property
    def ref(self) -> VersionRef:
        """The newest version that this publisher knows to be published."""
        return self._pipeline.ref

    @property
    def digest(self) -> str:
        """The version digest of `ref`, 32 hex digits."""
        return self._pipeline.baseline.digest

    def publish(self, source: WeightSource, step: int | None = None) -> Ticket:
        """Copy the weights of `source`, cast to the run's view, and return a ticket for them.

        `source` is an nn.Module, a mapping or an iterable of (name, tensor), or a WeightReader.
        Raises SchemaMismatchError listing unknown, missing or reshaped tensors, whatever the
        source raises, and PublisherClosedError; nothing is then accepted and nothing lost. With
        `when_busy="block"` it waits for the publish before; with "coalesce" this snapshot replaces
        one that still waits, whose ticket then ends with this one's version.
        """
        self._check_process()
        step = check_step(step)
        with self._snapshotting:
            snapshot = Snapshot(source, self._run.schema, self._run.record.view)
            slot = self._queue.claim(may_replace=snapshot.is_checked)
            try:
                snapshot.write_to(slot.buffer, self._shadow)
            except BaseException as error:
                self._queue.put_back(slot, error)
                raise
            reach("publish.snapshot")
            return self._queue.accept(slot, step)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything accepted so far has ended, anchors included.

        Raises the first failure that no one was told of yet, and TimeoutError after `timeout_s`.
        """
        self._check_process()
        self._wait_idle(timeout_s)
        self._raise_unnoticed()

    def _wait_idle(self, timeout_s: float | None) -> None:
        started_s = time.monotonic()
        self._queue.wait_idle(timeout_s)
        self._anchors.wait_idle(_left(timeout_s, started_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more, flush, and end the worker. Closing again is harmless.

        Raises as `flush` does. After a TimeoutError the worker goes on; close again to wait more.
        """
        self._check_process()
        started_s = time.monotonic()
        self._queue.close()
        with self._snapshotting:  # a snapshot under way is still accepted
            if self._shadow is not None:
                self._shadow.forget()
        self._wait_idle(_left(timeout_s, started_s))
        self._queue.stop()
        self._worker.join()
        if self._merging is not None:
            self._merging.close(_left(timeout_s, started_s))
        atexit.unregister(self._at_exit)
        if not (self._ended or self._pipeline.in_doubt):
            self._ended = True
            end_epoch(self._run, self._pipeline.epoch)
        self._raise_unnoticed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. What was accepted is published even if the body raised, whose error then wins."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            error.add_note(f"closing the publisher of run {self._run.name!r} failed: {failure}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"the publisher of run {self._run.name!r} belongs to process {self._pid} and "
                f"does not work in process {os.getpid()}, which was forked from it"
            )

    def _raise_unnoticed(self) -> None:
        errors = self._queue.take_unnoticed()
        if not errors:
            return
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors)} accepted snapshots were not published")
        raise errors[0]

    def _work(self) -> None:
        while (job := self._queue.next_job()) is not None:
            outcome = self._attempt(job)
            done = outcome if isinstance(outcome, Published) else None
            is_lent = done is not None and not self._anchors.surrender(done.freed)
            self._queue.settle(job, outcome, is_lent=is_lent)
            if done is not None:
                self._anchors.after(self._pipeline.baseline, done.stats.num_bytes)
                if self._merging is not None:
                    self._merging.wake()
            del outcome, done, job  # or their buffers would live on while this thread waits
            self._queue.rest_or_go_on()

    def _attempt(self, job: Job) -> Published | Exception:
        try:
            if self._pipeline.in_doubt:
                self._anchors.wait_idle()  # it may be reading what is then written to
            return self._pipeline.publish(job.buffer, job.step)
        except Exception as error:  # the edge of this task: the ticket carries it on
            if self._lost_its_threads(error):
                return self._attempt(job)
            log.error(
                "event=publish_failed run=%s after=%d step=%s error=%s: %s",
                self._run.name,
                self.ref.version,
                job.step,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, StitchError) else error,
            )
            # A ticket may live long; the frames would keep whole buffers alive with it.
            traceback.clear_frames(error.__traceback__)
            return error

    def _lost_its_threads(self, error: Exception) -> bool:
        """Whether the exiting interpreter refused new threads; the job then does without.

        Python says so in no other way than by these words.
        """
        refused = isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)
        if not refused or self._pipeline.threads == 1:
            return False
        self._pipeline.threads = 1
        return True

    def _at_exit(self) -> None:
        """Say that the program forgot to close, and save what can be saved."""
        if os.getpid() != self._pid:
            return
        log.warning("event=publisher_not_closed run=%s newest=%d", self._run.name, self.ref.version)
        try:
            self.close(EXIT_TIMEOUT_S)
        except Exception as error:
            log.error("event=snapshots_lost run=%s error=%s", self._run.name, error)


def _left(timeout_s: float | None, started_s: float) -> float | None:
    """What is left of a time-out that began at `started_s`."""
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started_s))
