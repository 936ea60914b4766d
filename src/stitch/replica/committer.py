"""One transaction on the engine: stage, close the gate, commit, move the label, open the gate."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch import failpoints
from stitch.engines.port import CommitReceipt, Engine, EngineDescription
from stitch.errors import EngineError, EngineUnreachableError, FatalReplicaError
from stitch.replica.gate import Gate
from stitch.replica.state import ReplicaStatus
from stitch.types import ReplicaState, VersionRef

if TYPE_CHECKING:
    from stitch.codec import DigestState, UpdateSet

log = logging.getLogger("stitch.replica.committer")

_RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A finished transaction."""

    receipt: CommitReceipt
    stage_s: float


class Committer:
    """Applies update sets to one engine; the only place that moves `status.applied`.

    `lock` is held by whatever must not meet a change of the label: transactions, `verify`, and the
    watchdog's comparison.
    """

    def __init__(
        self, engine: Engine, status: ReplicaStatus, gate: Gate, *, resolve_budget_s: float
    ) -> None:
        self.engine = engine
        self.holds: DigestState | None = None
        """The digests of what the engine serves, once that is proven."""
        self.lock = asyncio.Lock()
        self._status = status
        self._gate = gate
        self._resolve_budget_s = resolve_budget_s

    async def apply(
        self, base: VersionRef, target: VersionRef, update: UpdateSet, digests: DigestState
    ) -> Committed:
        """Bring the engine from `base` to `target`, which has `digests`.

        Raises EngineError or EngineUnreachableError when it still serves `base`, and
        FatalReplicaError when what it serves cannot be found out.
        """
        stage_id = f"{target.version}-{secrets.token_hex(6)}"
        async with self.lock:
            started_s = time.monotonic()
            self._enter(ReplicaState.STAGING, f"staging version {target.version}")
            await self.engine.stage(stage_id, base, target, update)
            failpoints.reach("replica.staged")
            staged_s = time.monotonic()
            async with self._gate.closed():
                self._enter(ReplicaState.COMMITTING, f"committing version {target.version}")
                failpoints.reach("replica.committing")
                self._status.in_doubt = target  # stays if this ends without an outcome
                receipt = await self._commit(stage_id, base, target)
                failpoints.reach("replica.committed")
                self._label(target)
                self.holds = digests
                self._status.in_doubt = None
            return Committed(receipt=receipt, stage_s=staged_s - started_s)

    def _label(self, target: VersionRef) -> None:
        """Say from now on that `target` is served. What is newest in another run is no matter."""
        status = self._status
        if status.run != target.run:
            status.newest = target.version
        status.run, status.applied = target.run, target.version

    def _enter(self, state: ReplicaState, doing: str) -> None:
        """While it catches up, that is the state; only what it is doing changes."""
        self._status.move(state if self._status.caught_up else ReplicaState.CATCHING_UP, doing)

    async def _commit(self, stage_id: str, base: VersionRef, target: VersionRef) -> CommitReceipt:
        try:
            receipt = await self.engine.commit(stage_id)
        except EngineUnreachableError as error:
            log.warning("event=commit_reply_lost stage=%s error=%s", stage_id, error)
            return await self._resolve(stage_id, base, target, error)
        except EngineError:
            self._status.in_doubt = None  # the engine has undone it and says so
            raise
        if receipt.ref != target:
            raise FatalReplicaError(f"the engine committed {receipt.ref}, {target} was staged")
        return receipt

    async def _resolve(
        self, stage_id: str, base: VersionRef, target: VersionRef, cause: Exception
    ) -> CommitReceipt:
        """Find out whether a commit happened whose reply was lost; the gate stays closed.

        When it did not, the stage is dropped before that is believed, so that a late request
        cannot commit it after all.
        """
        deadline_s = time.monotonic() + self._resolve_budget_s
        boot = self._status.engine.boot if self._status.engine is not None else None
        while time.monotonic() < deadline_s:
            try:
                now = await self.engine.describe()
                _check_alive(now, boot)
                if now.state != "committing":
                    if now.ref == target:
                        return await self.engine.commit(stage_id)  # the same receipt again
                    await self.engine.discard()
                    if (await self.engine.describe()).ref == base:
                        self._status.in_doubt = None
                        raise EngineError(f"the commit of {target} did not happen: {cause}")
            except EngineUnreachableError as error:
                cause = error
            await asyncio.sleep(_RETRY_S)
        raise FatalReplicaError(
            f"whether the engine serves {base} or {target} could not be found out within "
            f"{self._resolve_budget_s:g} s: {cause}"
        ) from cause


def _check_alive(now: EngineDescription, boot: str | None) -> None:
    if now.state == "failed":
        raise FatalReplicaError("the engine reports that it failed during a commit")
    if boot is not None and now.boot != boot:
        raise EngineRestartedError(f"the engine restarted (boot {boot}, now {now.boot})")


class EngineRestartedError(EngineError):
    """Another process answers now: what it serves must be proven anew."""
