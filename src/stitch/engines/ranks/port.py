"""What the front asks of every rank. Engine-independent; no torch here.

Calls travel through an engine's own RPC, which must never see an exception: every method returns a
dict of JSON values, an *answer*. `{"ok": True, ...}`, or
`{"ok": False, "type": NAME, "error": TEXT, ...}` where NAME is a class of `stitch.errors`:

- EngineError, UsageError, CorruptPatchError, SchemaMismatchError, BaseMismatchError: refused, and
  the weights are as before the call;
- FatalReplicaError: what this rank holds is in doubt. The replica must end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from stitch import errors
from stitch.errors import FatalReplicaError, StitchError

Answer = dict[str, Any]


class Rank(Protocol):
    """One rank's weights. Thread-safe; a call may run in any thread but not in a forward pass.

    Order of a life: `learn` on all ranks, `Agreement.of(schema, answers)` in front, `settle` on all
    ranks with its settlement, and from then on stages, commits and lanes.
    """

    def learn(self) -> Answer:
        """Find where every element lives and prove it against the reader; the weights stay.

        Must run while no request is served, with the reader's weights loaded. Answers `rank`,
        `world`, `notes` (texts for the start-up log), `seconds_s` and what Agreement needs. Asked
        again, it answers the same.
        """
        ...

    def settle(self, settlement: Mapping[str, Any]) -> Answer:
        """Adopt what the ranks agreed on (`Agreement.settlement`, the same for all)."""
        ...

    def describe(self) -> Answer:
        """`rank`, `world`, `learned`, `settled`, `num_tensors`, `num_blocks`, `live_bytes`,
        `refused` (name -> why it cannot be changed in place), `staged`, `committed` (stage ids or
        None), `epoch` (number of writes so far), `doubt` (text or None)."""
        ...

    def stage_part(self, stage_id: str, number: int, source: bytes | str) -> Answer:
        """Take part `number` (from 0; any order; repeats allowed when identical) of a stage.

        `source`: a path of this host, or the bytes of `UpdateSet.to_bytes`. The part is decoded,
        placed, its old words compared with the live ones and its new words moved to the device;
        nothing that is served changes. The file is no longer needed when it returns. A part of
        another stage drops the stage before it and the undo of the last commit. After an answer
        that is not ok no stage is held.
        """
        ...

    def seal(self, stage_id: str, num_parts: int, num_changed: int) -> Answer:
        """End a stage; must be exactly `num_parts` parts with `num_changed` changed elements.

        Answers `num_local` (live words that the commit writes on this rank), `dense_bytes` and
        `held_bytes`.
        """
        ...

    def commit(self, stage_id: str) -> Answer:
        """Write the sealed stage and read it back; only in a pause.

        Answers `write_ms`, for both. Committed already: ok again, without writing. If it
        fails, the old words are restored here before the answer (FatalReplicaError if they could
        not be).
        """
        ...

    def undo(self, stage_id: str) -> Answer:
        """Write back the old words of a committed stage, and read them back; only in a pause.

        Answers `undone`: False if this rank had not committed it (or restored itself), so the
        front may ask all ranks. FatalReplicaError if the old words did not take. Possible until
        the next stage's first part.
        """
        ...

    def discard(self) -> Answer:
        """Drop the stage, if any; a commit that happened can still be undone."""
        ...

    def forget(self) -> Answer:
        """Drop the stage and the undo of the last commit (a new label was bound)."""
        ...

    def lanes(self, names: Sequence[str] | None = None) -> Answer:
        """Digest terms of the live weights (default: of every tensor), for `Agreement.combine`.

        May run while serving, for as long as no commit does; EngineError (ask again) if the weights
        changed meanwhile. Holds commits off for some milliseconds at a time.
        """
        ...

    def begin(self, ticket: str, method: str, args: Sequence[Any]) -> Answer:
        """Start `method(*args)` in a thread of this rank, so that serving goes on meanwhile.

        For `stage_part`, `seal` and `lanes` through an RPC that holds up the engine's steps. One
        call at a time: UsageError while another is under way.
        """
        ...

    def finish(self, ticket: str, wait_s: float = 0.0) -> Answer:
        """The answer of a call that was begun, or `{"ok": True, "running": True}`."""
        ...


def failure(error: BaseException, **more: Any) -> Answer:
    """The answer for an error; whatever is not ours becomes an EngineError that names it."""
    kind, text = type(error).__name__, str(error)
    if not isinstance(error, StitchError):
        kind, text = "EngineError", f"{kind}: {text}"
    return {"ok": False, "type": kind, "error": text, **more}


def error_of(answer: Mapping[str, Any], what: str = "a rank") -> StitchError | None:
    """What an answer that is not ok stands for; FatalReplicaError if it makes no sense."""
    if answer.get("ok") is True:
        return None
    kind = getattr(errors, str(answer.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, StitchError)):
        return FatalReplicaError(f"{what} answered {answer!r:.300}")
    return kind(f"{what}: {answer.get('error')}")


def check(answers: Iterable[Mapping[str, Any]]) -> None:
    """Raise the gravest error among the ranks' answers (in rank order), if there is one."""
    found = [error_of(answer, f"rank {rank}") for rank, answer in enumerate(answers)]
    failed = [error for error in found if error is not None]
    if failed:
        raise next((e for e in failed if isinstance(e, FatalReplicaError)), failed[0])
