"""Keeping a publisher of an earlier epoch, which may only be asleep, out of the run for good.

Such a one has looked at the epochs and may commit its version at any later time. Only the number
that it would take can stop it: a new publisher takes that number itself, with a version that
changes nothing, unless it is sure that all before it are gone.
"""

from __future__ import annotations

import logging

from stitch.board import Run
from stitch.errors import PublishConflictError, StitchError
from stitch.mirror import lead
from stitch.publish.pipeline import Pipeline
from stitch.records import EpochRecord

log = logging.getLogger(__name__)


def fence(pipeline: Pipeline) -> None:
    """Publish a version without changes if an earlier publisher of the run may still live.

    If that one was faster, its version is taken up first. Raises what publishing raises;
    StaleEpochError if a newer epoch has begun meanwhile.
    """
    while True:
        epoch, step = _newest(pipeline)
        if pipeline.run.board.is_fenced(pipeline.epoch, epoch):
            return
        try:
            published = pipeline.publish(pipeline.baseline.weights, step)
        except PublishConflictError as error:
            log.warning("event=fence_was_late run=%s error=%s", pipeline.run.name, error)
            lead(pipeline.baseline, pipeline.run, threads=pipeline.threads)
            continue
        log.warning(
            "event=fenced version=%s epoch=%d reason=an earlier publisher may still be alive",
            published.ref, pipeline.epoch.epoch,
        )  # fmt: skip
        return


def _newest(pipeline: Pipeline) -> tuple[int, int | None]:
    """Epoch (0: none) and trainer's step of the version that is the baseline."""
    version = pipeline.ref.version
    if version == 0:
        return 0, None
    manifest = pipeline.run.manifest(version)
    return manifest.epoch, manifest.step


def end_epoch(run: Run, epoch: EpochRecord) -> None:
    """Spare the next publisher the fence; that it fails is no reason not to end."""
    try:
        run.board.end_epoch(epoch)
    except StitchError as error:
        log.warning("event=epoch_end_not_written epoch=%d error=%s", epoch.epoch, error)
