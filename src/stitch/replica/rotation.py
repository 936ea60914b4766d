"""The rotating proof: live weights compared with the board's, a few tensors at a time, for ever.

A commit is proven when it is written. What happens to the weights afterwards (a stray write, a bad
memory cell) shows here. It takes little of the engine and steps aside for transactions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from stitch.codec import DigestState
from stitch.engines.port import VerifyReport
from stitch.errors import EngineError, EngineUnreachableError, FatalReplicaError
from stitch.replica.committer import Committer
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.state import ReplicaStatus
from stitch.tensors.reader import batches_of_names
from stitch.types import Schema

log = logging.getLogger("stitch.replica.rotation")

IDLE_PER_BUSY = 20
"""Time that the engine is left alone for each time it took to look."""
MAX_REFUSALS = 3
"""Refused looks in a row after which what the engine holds counts as unknown."""


class Rotation:
    """`prove_forever` ends only by FatalReplicaError: the live weights are not the board's."""

    def __init__(
        self,
        status: ReplicaStatus,
        committer: Committer,
        metrics: ReplicaMetrics,
        schema: Schema,
        *,
        interval_s: float,
    ) -> None:
        """interval_s: least time between two looks; 0 for none at all."""
        self._status = status
        self._committer = committer
        self._metrics = metrics
        self._schema = schema
        self._interval_s = interval_s
        self._num_refused = 0

    async def prove_forever(self) -> None:
        if not self._interval_s:
            await asyncio.Event().wait()
        while True:
            for names in batches_of_names(self._schema):
                while not await self._looked(names):
                    pass
            self._metrics.proof_rounds.add(1.0)

    async def _looked(self, names: Sequence[str]) -> bool:
        """Try to prove some tensors, then leave the engine alone; whether it could be done."""
        took_s = await self._look(names)
        await asyncio.sleep(max(self._interval_s, IDLE_PER_BUSY * took_s))
        return took_s > 0

    async def _look(self, names: Sequence[str]) -> float:
        """Prove some tensors; seconds that it took, 0 if it could not be done now."""
        ref, wanted = self._status.ref, self._committer.holds
        if ref is None or wanted is None or self._committer.lock.locked():
            return 0.0
        start_s = time.monotonic()
        try:
            report = await self._committer.engine.verify(names)
        except EngineUnreachableError:  # the watchdog's business
            return 0.0
        except EngineError as error:
            self._refused(error)
            return 0.0
        self._num_refused = 0
        if report.ref != ref:  # a commit came in between
            return 0.0
        self._compare(report, names, wanted)
        self._metrics.proven_tensors.add(len(names))
        return max(time.monotonic() - start_s, 1e-6)

    def _refused(self, error: EngineError) -> None:
        self._num_refused += 1
        log.warning("event=proof_refused error=%s", error)
        if self._num_refused >= MAX_REFUSALS:
            raise FatalReplicaError(f"the engine cannot say what it holds: {error}") from error

    def _compare(self, report: VerifyReport, names: Sequence[str], wanted: DigestState) -> None:
        for name in names:
            digest = wanted.tensor_digest(self._schema.index[name])
            found = report.tensors.get(name)
            if found != digest:
                raise FatalReplicaError(
                    f"the engine's live weights are not those of {report.ref}: tensor {name} has "
                    f"digest {found}, that version has {digest}; nothing changed it through "
                    "Stitch, so restart the engine (and look at its memory if this comes back)"
                )
