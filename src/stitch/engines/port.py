"""The engine port: what Stitch asks of anything that serves weights.

An engine holds one copy of the weights, answers requests with them, and changes them in place
between two decoding steps. A version's label moves only when the weights behind it have been
written and read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from stitch.types import VersionRef

if TYPE_CHECKING:
    from stitch.codec import UpdateSet

EngineState = Literal["ready", "staging", "committing", "failed"]


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What an engine says about itself.

    `ref` is None until `bind` proved what the weights are. `committed` is the stage id of the
    commit that led to `ref` (None after a bind or a roll-back), so that a caller whose reply was
    lost can learn whether its commit happened. `boot` differs after every start of the process.
    """

    engine: str
    boot: str
    ref: VersionRef | None
    schema_digest: str
    state: EngineState
    staged: str | None = None
    staged_target: VersionRef | None = None
    committed: str | None = None
    stamps_versions: bool = False
    """Whether answers carry `weight_version_start`, `_end` and per-token spans."""
    salt_field: str | None = None
    """Request field that separates prefix caches; None where the engine has no prefix cache."""
    blocked_routes: tuple[str, ...] = ()
    """Paths (exact, or prefixes ending in `*`) that must not be reached from outside."""
    fixed_tensors: tuple[str, ...] = ()
    """Tensors that cannot be changed in place; a stage that touches one fails, naming it."""


@dataclass(frozen=True, kw_only=True)
class CommitReceipt:
    """A finished commit. `pause_ms` is the time in which no decoding step could run."""

    ref: VersionRef
    pause_ms: float
    num_changed: int


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Digests recomputed from the weights the engine really holds (32 hex digits each).

    `digest` is empty when only some tensors were asked for.
    """

    ref: VersionRef | None
    digest: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    seconds_s: float = 0.0


class Engine(Protocol):
    """Eight verbs. Mutating ones are serialised by the engine; each caller gets its own outcome.

    Every method raises EngineUnreachableError when the engine does not answer (then only
    `describe` can tell whether the operation happened) and EngineError when it refused or failed
    and still serves its old version.
    """

    async def describe(self) -> EngineDescription:
        """State right now; answers even while a stage or a commit is under way."""
        ...

    async def bind(self, ref: VersionRef, digest: str) -> None:
        """Prove that the live weights have version digest `digest`, then label them `ref`.

        Raises BaseMismatchError, with the label unchanged, when they do not. A stage and the undo
        of the last commit are dropped: they belong to the label before.
        """
        ...

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        """Check `update` against the live weights (label `base`, bounds, old bits) and hold it.

        Nothing that is served changes. It replaces an earlier stage and ends the roll-back of the
        last commit. On EngineError no stage is held.
        """
        ...

    async def commit(self, stage_id: str) -> CommitReceipt:
        """Pause between decoding steps, write, read back, label, resume.

        When it returns every later step uses the new weights. Asking again for a stage that is
        already committed returns the same receipt. If writing fails the old bits are restored and
        EngineError raised; if that fails too the engine process exits.
        """
        ...

    async def roll_back(self, to: VersionRef) -> None:
        """Undo the last commit, whose base must be `to`; possible until the next stage."""
        ...

    async def discard(self) -> None:
        """Drop the stage, if any."""
        ...

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        """Recompute the digests from the live weights while serving goes on.

        names: only of these tensors; SchemaMismatchError if there is none of a name.
        """
        ...

    async def close(self) -> None:
        """Release the connection to the engine; the engine itself keeps running."""
        ...
