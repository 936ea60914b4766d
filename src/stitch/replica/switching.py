"""From a version of one run to a version of another, with the same tensors.

A fork is reached by going on along what it was forked from, if the engine is not past the fork.
Any other run is reached from its base, or an anchor: a second mirror is brought to it, and what
differs is what changes in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from stitch.board import Run
from stitch.codec import UpdateSet, diff_update
from stitch.errors import BaseMismatchError, NoRouteError, SchemaMismatchError
from stitch.mirror import AdvanceError, Mirror, from_anchor_on_line, lead, line_of, recognise
from stitch.replica.config import ReplicaConfig
from stitch.replica.worker import Worker
from stitch.tensors import open_checkpoint
from stitch.views import ViewReader


@dataclass(frozen=True)
class Transfer:
    """What leads from one run's version to another's; `mirror` stands at the latter."""

    mirror: Mirror
    update: UpdateSet


class Switcher:
    """Prepares transfers; its methods run in the worker's thread."""

    def __init__(self, config: ReplicaConfig, worker: Worker) -> None:
        self._config = config
        self._worker = worker

    def prepare(self, run: Run, mirror: Mirror) -> Transfer:
        """Lead to the newest version of `run` that can be reached.

        Raises SchemaMismatchError if the runs have other tensors, BaseMismatchError if nothing
        leads there, AdvanceError if the way is broken before the run's version 0; the mirror is
        then as it was.
        """
        here, digests = mirror.ref, mirror.digests
        assert here is not None
        if mirror.schema.digest != run.record.schema_digest:
            raise SchemaMismatchError(
                f"run {run.name!r} is the current one now, but it has other tensors than {here} "
                f"(view {run.record.view!r}): start a replica of its own for it"
            )
        if any(part.holds(here) for part in line_of(run)[1:]):
            update, fault = self._lead(mirror, run)
            if fault is not None:
                mirror.undo(update, here, digests)
                raise fault
            return Transfer(mirror, update)
        fresh = self._fresh(run)
        fault = self._lead(fresh, run)[1]
        if fault is not None:
            raise fault
        return Transfer(fresh, diff_update(mirror.weights, fresh.weights))

    def _fresh(self, run: Run) -> Mirror:
        """A mirror of something that leads to `run`: the checkpoint, or else an anchor."""
        with open_checkpoint(self._config.model) as checkpoint:
            reader = ViewReader(checkpoint, run.record.view)
            mirror = Mirror.load(reader, threads=self._config.threads)
        try:
            recognise(mirror, run)
        except BaseMismatchError as mismatch:
            del mirror
            try:
                return from_anchor_on_line(run, scratch=self._config.scratch)
            except NoRouteError as error:
                raise BaseMismatchError(f"{mismatch}; {error}") from None
        return mirror

    def _lead(self, mirror: Mirror, run: Run) -> tuple[UpdateSet, AdvanceError | None]:
        """As far as it goes; a fault that lets no version of `run` be reached is returned."""
        try:
            update = lead(
                mirror,
                run,
                scratch=self._config.scratch,
                stop=self._worker.stopping,
                threads=self._config.threads,
            )
        except AdvanceError as error:
            reached = mirror.ref is not None and mirror.ref.run == run.name
            return error.partial, None if reached else error
        return update, None
