"""Forked runs: version 0 of a fork is a version of another run, and the same routes lead to both.

A fork copies no weights. Whoever has weights of a run that it descends from goes on along that run
to where the fork left it, and from there along the fork.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch.board import Run
from stitch.codec import UpdateSet
from stitch.errors import BaseMismatchError, CorruptBlobError, NoRouteError, UsageError
from stitch.mirror.advance import AdvanceError
from stitch.mirror.mirror import Mirror
from stitch.tensors.reader import Progress
from stitch.types import VersionRef

log = logging.getLogger(__name__)

MAX_ANCESTORS = 64


@dataclass(frozen=True)
class Stretch:
    """The part of a run that leads to its descendant: versions up to `end` (None: all)."""

    run: Run
    end: int | None

    def holds(self, ref: VersionRef) -> bool:
        return ref.run == self.run.name and (self.end is None or ref.version <= self.end)


def line_of(run: Run) -> list[Stretch]:
    """`run`, the run that it was forked from up to the fork, and so on.

    Ends early where an ancestor is gone from the board, or is not what its descendant says.
    """
    line = [Stretch(run, None)]
    while (parent := line[-1].run.record.parent) is not None and len(line) <= MAX_ANCESTORS:
        if any(parent.run == stretch.run.name for stretch in line):
            break
        if (found := _ancestor(line[-1].run, parent)) is None:
            break
        line.append(Stretch(found, parent.version))
    return line


def _ancestor(child: Run, parent: VersionRef) -> Run | None:
    """The parent run, checked to have been at the child's base; None if it is of no use."""
    try:
        found = child.board.open_run(parent.run)
        digest = found.digest(parent.version)
    except UsageError as error:  # gone, or damaged
        log.warning("event=ancestor_unusable run=%s parent=%s error=%s", child.name, parent, error)
        return None
    mine, its = child.record, found.record
    if (digest, its.schema_digest, its.view) == (mine.base_digest, mine.schema_digest, mine.view):
        return found
    log.warning(
        "event=ancestor_is_another run=%s parent=%s digest=%s base_digest=%s",
        child.name, parent, digest, mine.base_digest,
    )  # fmt: skip
    return None


def root_base(run: Run) -> str:
    """Where the checkpoint is that the eldest ancestor on the board started from."""
    return line_of(run)[-1].run.record.base


def recognise(mirror: Mirror, run: Run, versions: Iterable[int] = ()) -> VersionRef:
    """Find out, by digest, what the weights are: a base on the line of `run`, or one of its
    `versions`.

    Raises BaseMismatchError, which tells of `run`, if they are neither.
    """
    try:
        return mirror.identify(run, versions)
    except BaseMismatchError as mismatch:
        for stretch in line_of(run)[1:]:
            try:
                return mirror.identify(stretch.run)
            except BaseMismatchError:
                continue
        raise mismatch


def lead(mirror: Mirror, run: Run, target: int | None = None, **how: Any) -> UpdateSet:
    """`Mirror.advance` that also begins at a version of an ancestor, up to the fork.

    Raises what `advance` does; after an AdvanceError the mirror stands where that says, and its
    `partial` leads there from the mirror's start.
    """
    here, digests = mirror.ref, mirror.digests
    if here is None or here.run == run.name:
        return mirror.advance(run, target, **how)
    line = line_of(run)
    first = next((number for number, part in enumerate(line) if part.holds(here)), 0)
    updates: list[UpdateSet] = []
    try:
        for number in range(first, 0, -1):
            part, child = line[number], line[number - 1].run
            updates.append(mirror.advance(part.run, part.end, **how))
            if mirror.ref != VersionRef(part.run.name, part.end or 0):  # told to stop
                return UpdateSet.compose(updates)
            mirror.enter(child)
        updates.append(mirror.advance(run, target, **how))
        return UpdateSet.compose(updates)
    except AdvanceError as error:
        error.partial = UpdateSet.compose([*updates, error.partial])
        raise
    except BaseException:
        if mirror.ref is not None:
            mirror.undo(UpdateSet.compose(updates), here, digests)
        raise


def from_anchor_on_line(
    run: Run,
    want: int | None = None,
    *,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Mirror:
    """A mirror at the newest intact anchor of `run`, not above `want`, or else of an ancestor.

    Raises NoRouteError, which says what is wrong with those there are.
    """
    faults = []
    for part in [Stretch(run, want), *line_of(run)[1:]]:
        for version in sorted(part.run.anchors(), reverse=True):
            if part.end is not None and version > part.end:
                continue
            try:
                anchor = part.run.anchor(version)
                if anchor is not None:
                    return Mirror.from_anchor(part.run, anchor, scratch=scratch, progress=progress)
            except (CorruptBlobError, UsageError) as error:
                faults.append(f"; anchor {VersionRef(part.run.name, version)}: {error}")
    raise NoRouteError(f"run {run.name!r}: there is no usable anchor{''.join(faults)}")
