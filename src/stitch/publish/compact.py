"""The compactor: writes merged patches, so that readers far behind fetch few objects and bytes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from stitch.board import Run, keys, plan_route, spans
from stitch.board.spans import Span
from stitch.codec import PatchEncoder
from stitch.codec.choice import Decode
from stitch.errors import StitchError, StoreError
from stitch.failpoints import reach
from stitch.mirror import Mirror
from stitch.publish.origin import Origin
from stitch.records import BlobRef, MergedPatch

log = logging.getLogger(__name__)


class Compactor:
    """Writes the merged patches that a run lacks. Not thread-safe; several may work on one run.

    Two mirrors are held, one at each end of the span that is being merged, and of what leads them
    there one patch at a time: memory for the view twice and for a few buckets. Patches already
    merged lead to longer ones. Nothing is held over on the board: killed anywhere, it leaves blobs
    that nothing names, and of two that race for one span either wins.
    """

    def __init__(
        self,
        run: Run,
        *,
        base: Path | None = None,
        scratch: Path | None = None,
        encoding: str = "auto",
        decode: Decode = "any",
        threads: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """`base`: the run's base checkpoint (default: where the run record says); without one an
        anchor is kept in `scratch`. `stop` is asked often; once True, `compact` returns early."""
        self.run = run
        self.skipped: dict[Span, str] = {}
        """Spans that could not be merged, and why; they are tried again by the next compactor."""
        self._origin = Origin(run, base, scratch, threads)
        self._scratch = scratch
        self._encoding = encoding
        self._decode = decode
        self._threads = threads
        self._stop = stop or (lambda: False)
        self._writer = f"c{secrets.token_hex(8)}"
        self._num_attempts = 0
        self._seen = 0
        self._left: set[Span] = set()
        self._low: Mirror | None = None
        self._high: Mirror | None = None

    def close(self) -> None:
        """Give back memory and scratch space."""
        self._low = self._high = None
        self._origin.close()

    def compact(
        self, on_span: Callable[[MergedPatch | None], object] = lambda merged: None
    ) -> list[MergedPatch]:
        """Write what is missing up to the newest version; returns the records in force.

        `on_span` is called after each span, with None for one that was left out. A span that no
        route leads to, or that would not be smaller than what it stands for, is `skipped`.
        Raises StoreError if the store fails; what was written until then stands.
        """
        self._look()
        done: list[MergedPatch] = []
        with suppress(_StoppedError):
            for start, stop in cheapest_order(self._left):
                self._check_stop(0, 0)
                merged = self._try(start, stop)
                if merged is not None:
                    done.append(merged)
                on_span(merged)
        return done

    @property
    def num_left(self) -> int:
        """Spans that the last look at the board found missing, and that are still to work on."""
        return len(self._left)

    def _look(self) -> None:
        """Note spans up to the newest version that are not on the board."""
        newest = self.run.newest(after=self._seen)
        if newest == self._seen:
            return
        new = {span for span in spans.spans(newest) if span[1] > self._seen}
        if self._seen == 0:
            new -= self._done_with()
        self._left |= new
        self._seen = newest

    def _done_with(self) -> set[Span]:
        """Spans that are on the board, or that retention has no use for beside a longer one."""
        present = set(self.run.merged_spans())
        retention = self.run.retention()
        first = 0 if retention is None else retention.first
        inside = {
            (start, stop)
            for whole in present
            for start, stop in spans.inside(whole)
            if stop <= first
        }
        return present | inside

    def _try(self, start: int, stop: int) -> MergedPatch | None:
        try:
            merged = self.run.merged(start, stop) or self._merge(start, stop)
        except StoreError:
            raise
        except (StitchError, _LargerError) as error:
            if isinstance(error.__cause__, StoreError):
                raise error.__cause__ from error
            log.warning(
                "event=span_skipped run=%s from=%d to=%d error=%s",
                self.run.name, start, stop, error,
            )  # fmt: skip
            self.skipped[start, stop] = str(error)
            merged = None
        self._left.discard((start, stop))
        return merged

    def _merge(self, start: int, stop: int) -> MergedPatch:
        limit = plan_route(self.run, start, stop).num_bytes
        low, high = self._ends(start, stop)
        encoder = PatchEncoder(
            low.weights,
            high.weights,
            before=low.digests,
            encoding=self._encoding,
            decode=self._decode,
            threads=self._threads,
            progress=self._check_stop,
        )
        self._num_attempts += 1
        attempt = f"{self._writer}-{self._num_attempts}"
        blobs: list[BlobRef] = []
        try:
            for number, data in enumerate(encoder.parts()):
                name = keys.merged_blob_name(start, attempt, number)
                blobs.append(self.run.put_blob(stop, name, data))
                reach("merge.blob")
                if sum(ref.num_bytes for ref in blobs) > limit:
                    raise _LargerError(f"merged it takes more than the {limit} bytes of its parts")
            merged = MergedPatch(
                run=self.run.name,
                version=stop,
                base_version=start,
                digest_before=low.digest,
                digest_after=encoder.after.version_digest(),
                schema_digest=self.run.record.schema_digest,
                blobs=tuple(blobs),
                stats=encoder.stats,
                created_unix_s=time.time(),
                writer=self._writer,
            )
            found = self.run.commit_merged(merged)
        except StoreError:
            raise  # the record may have been created after all, so its blobs must stay
        except (StitchError, _LargerError, _StoppedError):
            self._discard(stop, blobs)
            raise
        if found.blobs != merged.blobs:
            self._discard(stop, blobs)
        reach("merge.done")
        log.info(
            "event=merged run=%s from=%d to=%d num_bytes=%d parts_bytes=%d",
            self.run.name, start, stop, found.num_bytes, limit,
        )  # fmt: skip
        return found

    def _ends(self, start: int, stop: int) -> tuple[Mirror, Mirror]:
        """The two mirrors, moved there; made anew where they have passed it."""
        low = _not_beyond(self._low, start)
        if low is None:
            self._low = None  # before there is another one
            self._low = low = self._origin.mirror(start)
        self._move(low, start)
        high = _not_beyond(self._high, stop)
        if high is None:
            self._high = None
            self._high = high = low.copy()
        self._move(high, stop)
        return low, high

    def _move(self, mirror: Mirror, version: int) -> None:
        mirror.advance(
            self.run, version, scratch=self._scratch, stop=self._stop, threads=self._threads
        )
        if mirror.ref is None or mirror.ref.version != version:
            raise _StoppedError

    def _check_stop(self, done: int, total: int) -> None:
        if self._stop():
            raise _StoppedError

    def _discard(self, version: int, blobs: Iterable[BlobRef]) -> None:
        """Delete blobs of ours that no record names."""
        for ref in blobs:
            try:
                self.run.delete_unnamed_blob(version, ref)
            except StitchError as error:
                log.info("event=blob_left_behind version=%d error=%s", version, error)


def _not_beyond(mirror: Mirror | None, version: int) -> Mirror | None:
    """`mirror` if it can still move to `version`."""
    at_most = mirror is not None and mirror.ref is not None and mirror.ref.version <= version
    return mirror if at_most else None


class _StoppedError(Exception):
    """Whoever runs the compactor wants it to end."""


class _LargerError(Exception):
    """What was merged takes more bytes than its parts."""


def cheapest_order(left: Collection[Span]) -> list[Span]:
    """Spans in an order in which the lower mirror seldom has to start again.

    Level by level is best for a whole run: longer spans are merged from shorter ones. By their
    ends, long ones first, is best for a few new versions.
    """
    by_length = sorted(left, key=lambda span: (span[1] - span[0], span[0]))
    by_end = sorted(left, key=lambda span: (span[1], span[0]))
    return min(by_length, by_end, key=_num_steps_back)


def _num_steps_back(order: Sequence[Span]) -> int:
    return sum(b[0] < a[0] for a, b in pairwise(order))
