"""Establishing what the engine really serves, before any version is claimed.

The mirror is loaded from the checkpoint that the engine was started from; the engine recomputes
its digest from its live weights and the two must agree. An engine that survived its sidecar is
checked against the version it is labelled with. An engine with other weights than the run's base
can be brought onto the run through an anchor, if what it holds is known exactly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from stitch.board import Run
from stitch.codec import UpdateSet
from stitch.engines.port import EngineDescription
from stitch.errors import (
    BaseMismatchError,
    CorruptRecordError,
    EngineUnreachableError,
    FatalReplicaError,
    NoRouteError,
    StoreError,
    UsageError,
)
from stitch.mirror import Mirror, from_anchor_on_line, lead, line_of, recognise
from stitch.records import AnchorRecord
from stitch.replica.committer import Committer
from stitch.replica.state import ReplicaStatus
from stitch.replica.worker import Worker
from stitch.tensors import open_checkpoint
from stitch.types import ReplicaState, VersionRef
from stitch.views import ViewReader

log = logging.getLogger("stitch.replica.prover")

MAX_IDENTIFIED = 256
"""Newest versions that a checkpoint is compared with when it is not the base."""


class Prover:
    """Makes a mirror that provably equals the engine's weights."""

    def __init__(
        self,
        status: ReplicaStatus,
        committer: Committer,
        worker: Worker,
        *,
        model: Path,
        scratch: Path | None,
        threads: int,
        busy_budget_s: float,
    ) -> None:
        self._status = status
        self._committer = committer
        self._engine = committer.engine
        self._worker = worker
        self._model = model
        self._scratch = scratch
        self._threads = threads
        self._busy_budget_s = busy_budget_s

    async def prove(self, run: Run) -> Mirror:
        """Bind the engine to a version of `run` and return the mirror at that version.

        Raises FatalReplicaError when the weights are not the run's and cannot be brought there.
        """
        self._status.move(ReplicaState.VERIFYING, f"loading {self._model}")
        mirror = await self._worker.run(self._load, run)
        now = await self._settled()
        self._status.engine = now
        self._check_schema(run, now, mirror)
        self._status.move(ReplicaState.VERIFYING, "comparing the engine's weights with the run")
        async with self._committer.lock:
            try:
                return await self._bound(run, mirror, now.ref)
            except BaseMismatchError as error:
                mismatch = error
        await self._enter_by_anchor(run, mirror, mismatch)
        return mirror

    def _load(self, run: Run) -> Mirror:
        with open_checkpoint(self._model) as checkpoint:
            reader = ViewReader(checkpoint, run.record.view)
            return Mirror.load(reader, threads=self._threads)

    async def _settled(self) -> EngineDescription:
        """The engine's state once nothing of an earlier sidecar is under way or staged."""
        deadline_s = time.monotonic() + self._busy_budget_s
        while True:
            now = await self._engine.describe()
            if now.state == "failed":
                raise FatalReplicaError("the engine reports that it failed; restart it")
            if now.state == "ready":
                break
            if time.monotonic() > deadline_s:
                raise EngineUnreachableError(f"the engine stays in state {now.state!r}")
            await asyncio.sleep(0.1)
        if now.staged is not None:
            await self._engine.discard()
        return now

    def _check_schema(self, run: Run, now: EngineDescription, mirror: Mirror) -> None:
        wanted = run.schema.digest
        for who, found in (
            (f"the checkpoint {self._model}", mirror.schema.digest),
            ("the engine", now.schema_digest),
        ):
            if found != wanted:
                raise FatalReplicaError(
                    f"{who} has other tensors than run {run.name!r} (view {run.record.view!r}): "
                    f"schema digest {found}, expected {wanted}; serve the run's base, "
                    f"{run.record.base}"
                )

    async def _bound(self, run: Run, mirror: Mirror, label: VersionRef | None) -> Mirror:
        """Prove the engine's label, or what its checkpoint is if it has none.

        Returns the mirror at that version; raises BaseMismatchError if the weights are not it.
        """
        labelled = await self._worker.run(_run_of, run, label) if label is not None else None
        if label is not None and labelled is not None:
            self._status.move(ReplicaState.VERIFYING, f"proving that the engine serves {label}")
            mirror = await self._worker.run(self._mirror_at, labelled, mirror, label)
            ref = label
        else:
            ref = await self._worker.run(_identify, run, mirror)
        await self._engine.bind(ref, mirror.digest)
        self._status.run, self._status.applied = ref.run, ref.version
        self._committer.holds = mirror.digests
        self._status.in_doubt = None
        return mirror

    def _mirror_at(self, run: Run, mirror: Mirror, ref: VersionRef) -> Mirror:
        """The mirror at `ref`: from the checkpoint if that leads there, else from an anchor."""
        try:
            _identify(run, mirror)
        except BaseMismatchError as mismatch:
            try:
                mirror = from_anchor_on_line(run, ref.version, scratch=self._scratch)
            except NoRouteError as error:
                raise BaseMismatchError(f"{mismatch}; {error}") from None
        lead(
            mirror,
            run,
            ref.version,
            scratch=self._scratch,
            stop=self._worker.stopping,
            threads=self._threads,
        )
        return mirror

    async def _enter_by_anchor(self, run: Run, mirror: Mirror, mismatch: BaseMismatchError) -> None:
        """Replace whatever the engine holds by an anchor of the run; it serves nothing meanwhile.

        The label it gets until then names its content, so the stage's old-bits check has a base
        and no version is claimed.
        """
        owner, anchor = await self._worker.run(_newest_anchor, run)
        if anchor is None:
            raise FatalReplicaError(
                f"{mismatch}; the board holds no anchor of the run to enter by: start the engine "
                f"from the run's base ({run.record.base}), or write one with `stitch anchor`"
            ) from mismatch
        held = await self._engine.verify()
        if held.digest != mirror.digest:
            raise FatalReplicaError(
                f"{mismatch}; the engine holds digest {held.digest} while its checkpoint "
                f"{self._model} has {mirror.digest}, so what it serves is not known: restart it"
            ) from mismatch
        log.warning(
            "event=entering_by_anchor run=%s anchor=%d reason=%s",
            run.name, anchor.version, mismatch,
        )  # fmt: skip
        self._status.move(ReplicaState.VERIFYING, f"fetching anchor {anchor.version}")
        label = VersionRef(f"unproven-{mirror.digest[:16]}", 0)
        await self._engine.bind(label, mirror.digest)
        update: UpdateSet = await self._worker.run(mirror.jump, owner, anchor, self._scratch)
        target = VersionRef(owner.name, anchor.version)
        await self._committer.apply(label, target, update, mirror.digests)


def _identify(run: Run, mirror: Mirror) -> VersionRef:
    """Which version the checkpoint is: the base of the run or of one that it was forked from, or
    one of the newest (a checked-out one)."""
    try:
        return recognise(mirror, run)
    except BaseMismatchError as mismatch:
        newest = run.newest()
        try:
            return mirror.identify(run, range(newest, max(0, newest - MAX_IDENTIFIED), -1))
        except (BaseMismatchError, StoreError, CorruptRecordError):
            raise mismatch from None


def _run_of(run: Run, label: VersionRef) -> Run | None:
    """The run whose version the engine says it serves, if that is on the board and can be proven by
    its patches; None for what the checkpoint alone must prove."""
    if label.version == 0:
        return None
    if label.run == run.name:
        return run
    try:
        found = run.board.open_run(label.run)
        found.digest(label.version)
    except UsageError:
        return None
    return found if found.record.schema_digest == run.record.schema_digest else None


def _newest_anchor(run: Run) -> tuple[Run, AnchorRecord | None]:
    """The newest anchor of the run, else of one that it was forked from, up to the fork."""
    for part in line_of(run):
        versions = [v for v in part.run.anchors() if part.end is None or v <= part.end]
        if versions:
            return part.run, part.run.anchor(max(versions))
    return run, None
