"""Where a publisher begins: a new run from its base, a fork, or an old run's newest version."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from stitch.board import Board, Run, open_board
from stitch.errors import (
    BaseMismatchError,
    LineageError,
    NoRouteError,
    RunExistsError,
    StoreError,
    StoreUnsuitableError,
    UsageError,
    VersionRemovedError,
)
from stitch.mirror import (
    AdvanceError,
    Mirror,
    from_anchor_on_line,
    lead,
    recognise,
    root_base,
)
from stitch.publish.base import describe_base, read_assets, resolve_base
from stitch.records import EpochRecord, RunRecord
from stitch.tensors import open_checkpoint
from stitch.tensors.reader import Progress
from stitch.types import VersionRef, check_run_name
from stitch.views import ViewReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """A run, the weights of its newest version, and the right to publish the next one."""

    run: Run
    baseline: Mirror
    epoch: EpochRecord


def as_board(board: Board | str | Path) -> Board:
    return board if isinstance(board, Board) else open_board(board)


def new_writer() -> str:
    """A name that no other publisher, here or elsewhere, has or will have."""
    return f"w{uuid.uuid4().hex[:16]}"


def sweep(board: Board) -> None:
    """Delete what killed writers left on the board; that it fails is no reason not to publish."""
    try:
        board.sweep_temporaries()
    except (StoreError, StoreUnsuitableError) as error:
        log.warning("event=sweep_failed board=%s error=%s", board.url, error)


def check_same(board: Board, run: str, view: str | None, parent: VersionRef | str | None) -> None:
    """Raise UsageError unless `run` publishes `view` and was forked from `parent`, where given."""
    record = board.open_run(run).record
    if view is not None and record.view != view:
        raise UsageError(f"run {run!r} publishes view {record.view!r}, not {view!r}")
    if parent is not None and str(record.parent) != str(parent):
        was = f"forked from {record.parent}" if record.parent else "not forked"
        raise UsageError(f"run {run!r} exists and was {was}, not from {parent}")


def start_run(
    board: Board,
    run: str,
    base: str | Path,
    view: str,
    progress: Progress | None,
    threads: int | None,
) -> Lineage:
    """See Publisher.start. The run record is created last but for the epoch."""
    board.check_store()  # before hours of reading
    check_absent(board, check_run_name(run))  # likewise; create_run decides
    sweep(board)
    writer = new_writer()
    with open_checkpoint(resolve_base(base)) as checkpoint:
        baseline = Mirror.load(ViewReader(checkpoint, view), progress, threads)
        assets = tuple(
            board.put_asset(run, name, data) for name, data in read_assets(checkpoint).items()
        )
    record = RunRecord(
        run=run,
        base=describe_base(base),
        view=view,
        base_digest=baseline.digest,
        schema_digest=baseline.schema.digest,
        num_bytes=baseline.schema.num_bytes,
        created_unix_s=time.time(),
        writer=writer,
        assets=assets,
    )
    created = board.create_run(record, baseline.schema)
    baseline.identify(created)
    return Lineage(run=created, baseline=baseline, epoch=board.begin_epoch(run, writer))


def fork_run(
    board: Board,
    run: str,
    parent: VersionRef,
    base: str | Path | None,
    progress: Progress | None,
    threads: int | None,
    scratch: Path | None,
) -> tuple[Run, Mirror]:
    """Create `run`, whose version 0 is `parent`: its weights are rebuilt and proven, not copied.

    Raises as `resume_run` does, and VersionNotFoundError or VersionRemovedError for the parent.
    """
    board.check_store()
    check_absent(board, check_run_name(run))
    origin = board.open_run(parent.run)
    digest = origin.digest(parent.version)
    baseline = rebuilt(origin, parent.version, base, progress, threads, scratch)
    if baseline.digest != digest:
        raise BaseMismatchError(f"{parent} has digest {digest}, rebuilt was {baseline.digest}")
    assets = tuple(
        board.put_asset(run, ref.name, origin.read_asset(ref)) for ref in origin.record.assets
    )
    record = RunRecord(
        run=run,
        base=str(parent),
        view=origin.record.view,
        base_digest=digest,
        schema_digest=origin.record.schema_digest,
        num_bytes=origin.record.num_bytes,
        created_unix_s=time.time(),
        writer=new_writer(),
        parent=parent,
        assets=assets,
    )
    created = board.create_run(record, baseline.schema)
    baseline.enter(created)
    log.info("event=forked run=%s parent=%s digest=%s", run, parent, digest)
    return created, baseline


def start_fork(
    board: Board,
    run: str,
    parent: VersionRef | str,
    base: str | Path | None,
    view: str | None,
    progress: Progress | None,
    threads: int | None,
    scratch: Path | None,
) -> Lineage:
    """A fork of `parent`, and the right to publish into it; see Publisher.start."""
    ref = VersionRef.parse(parent) if isinstance(parent, str) else parent
    if view is not None:
        check_same(board, ref.run, view, None)
    created, baseline = fork_run(board, run, ref, base, progress, threads, scratch)
    epoch = board.begin_epoch(run, new_writer())
    return Lineage(run=created, baseline=baseline, epoch=epoch)


def check_absent(board: Board, run: str) -> None:
    """Raise RunExistsError if the board has the run."""
    if run in board.runs():
        raise RunExistsError(f"the board at {board.url} has a run {run!r}: resume it, or open it")


def resume_run(
    board: Board,
    run: str,
    base: str | Path | None,
    progress: Progress | None,
    threads: int | None,
    scratch: Path | None,
) -> Lineage:
    """See Publisher.resume. A publisher that still runs is stopped only once this one can go on."""
    found = board.open_run(run)
    board.check_store()
    sweep(board)
    baseline = rebuilt(found, None, base, progress, threads, scratch)
    epoch = board.begin_epoch(run, new_writer())
    _advance(found, baseline, None, scratch, threads)  # over what was published until just now
    log.info("event=resumed run=%s newest=%s epoch=%d", run, baseline.ref, epoch.epoch)
    return Lineage(run=found, baseline=baseline, epoch=epoch)


def rebuilt(
    run: Run,
    version: int | None,
    base: str | Path | None,
    progress: Progress | None,
    threads: int | None,
    scratch: Path | None,
) -> Mirror:
    """A mirror at `version` (None: the newest), from the base or an anchor, of `run` or of what
    it was forked from. LineageError if the board cannot reproduce it."""
    mirror = _base_mirror(run, base, progress, threads)
    if mirror is None:
        mirror = _anchor_mirror(run, version, scratch)
    _advance(run, mirror, version, scratch, threads)
    return mirror


def _base_mirror(
    run: Run, base: str | Path | None, progress: Progress | None, threads: int | None
) -> Mirror | None:
    """The base of the run, or of what it was forked from, from its checkpoint; None if that is
    absent or another one."""
    try:
        with open_checkpoint(resolve_base(root_base(run) if base is None else base)) as checkpoint:
            mirror = Mirror.load(ViewReader(checkpoint, run.record.view), progress, threads)
        recognise(mirror, run)
        return mirror
    except UsageError as error:
        log.warning("event=base_not_usable run=%s error=%s", run.name, error)
        return None


def _anchor_mirror(run: Run, version: int | None, scratch: Path | None) -> Mirror:
    try:
        return from_anchor_on_line(run, version, scratch=scratch)
    except NoRouteError as error:
        raise LineageError(
            f"run {run.name!r} cannot be continued: its base ({run.record.base}, digest "
            f"{run.record.base_digest}) is not at hand; {error}"
        ) from error


def _advance(
    run: Run, mirror: Mirror, version: int | None, scratch: Path | None, threads: int | None
) -> None:
    try:
        lead(mirror, run, version, scratch=scratch, threads=threads)
    except AdvanceError as error:
        if isinstance(error.__cause__, StoreError | VersionRemovedError):
            raise error.__cause__ from error
        wanted = "its newest version" if version is None else f"version {version}"
        raise LineageError(
            f"run {run.name!r} cannot be continued: {wanted} cannot be reproduced: {error}"
        ) from error
