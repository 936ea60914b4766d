"""Where a publisher begins: a new run from its base, or an old run at its newest version."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from stitch.board import Board, Run, open_board
from stitch.errors import (
    CorruptBlobError,
    LineageError,
    RunExistsError,
    StoreError,
    StoreUnsuitableError,
    UsageError,
)
from stitch.mirror import AdvanceError, Mirror
from stitch.publish.base import describe_base, read_assets, resolve_base
from stitch.records import EpochRecord, RunRecord
from stitch.tensors import open_checkpoint
from stitch.tensors.reader import Progress
from stitch.types import check_run_name
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


def check_view(board: Board, run: str, view: str) -> None:
    """Raise UsageError unless `run` publishes `view`."""
    found = board.open_run(run).record.view
    if found != view:
        raise UsageError(f"run {run!r} publishes view {found!r}, not {view!r}")


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
    baseline = _base_mirror(found, base, progress, threads) or _anchor_mirror(found, scratch)
    _advance(found, baseline, scratch, threads)
    epoch = board.begin_epoch(run, new_writer())
    _advance(found, baseline, scratch, threads)  # over what was published until just now
    log.info("event=resumed run=%s newest=%s epoch=%d", run, baseline.ref, epoch.epoch)
    return Lineage(run=found, baseline=baseline, epoch=epoch)


def _base_mirror(
    run: Run, base: str | Path | None, progress: Progress | None, threads: int | None
) -> Mirror | None:
    """The run's base from its checkpoint, or None if that is absent or another one."""
    try:
        with open_checkpoint(resolve_base(run.record.base if base is None else base)) as checkpoint:
            mirror = Mirror.load(ViewReader(checkpoint, run.record.view), progress, threads)
        mirror.identify(run)
        return mirror
    except UsageError as error:
        log.warning("event=base_not_usable run=%s error=%s", run.name, error)
        return None


def _anchor_mirror(run: Run, scratch: Path | None) -> Mirror:
    """The newest anchor that is intact."""
    faults: list[str] = []
    for version in sorted(run.anchors(), reverse=True):
        try:
            anchor = run.anchor(version)
            if anchor is not None:
                return Mirror.from_anchor(run, anchor, scratch=scratch)
        except (CorruptBlobError, UsageError) as error:
            faults.append(f"anchor {version}: {error}")
    raise LineageError(
        f"run {run.name!r} cannot be continued: its base ({run.record.base}, digest "
        f"{run.record.base_digest}) is not at hand and there is no usable anchor"
        + "".join(f"; {fault}" for fault in faults)
    )


def _advance(run: Run, mirror: Mirror, scratch: Path | None, threads: int | None) -> None:
    try:
        mirror.advance(run, scratch=scratch, threads=threads)
    except AdvanceError as error:
        if isinstance(error.__cause__, StoreError):
            raise error.__cause__ from error
        raise LineageError(
            f"run {run.name!r} cannot be continued: its newest version cannot be "
            f"reproduced: {error}"
        ) from error
