"""What every engine refuses, in one wording: the port's rules about labels and stages."""

from __future__ import annotations

from typing import Protocol, TypeVar

from stitch.errors import BaseMismatchError, EngineError
from stitch.types import VersionRef


class Stage(Protocol):
    """What an engine holds between staging and rolling back."""

    @property
    def stage_id(self) -> str: ...

    @property
    def base(self) -> VersionRef: ...


_Stage = TypeVar("_Stage", bound=Stage)


def check_bind(found: str, ref: VersionRef, digest: str) -> None:
    """Raise BaseMismatchError unless the live weights have the digest of `ref`."""
    if found != digest:
        raise BaseMismatchError(
            f"the engine holds weights of digest {found}, {ref} has {digest}: start it "
            "from the run's base, or from a checkout of a version of this run"
        )


def check_new(stage_id: str, last: Stage | None) -> None:
    """Raise EngineError if this stage is what was committed last."""
    if last is not None and last.stage_id == stage_id:
        raise EngineError(f"stage {stage_id!r} is already committed")


def check_base(base: VersionRef, ref: VersionRef | None) -> None:
    """Raise EngineError unless a stage starts from what the engine serves."""
    if base != ref:
        raise EngineError(f"the stage starts from {base}, the engine serves {ref}")


def held(stage_id: str, staged: _Stage | None) -> _Stage:
    """The stage of this id, or EngineError."""
    if staged is None or staged.stage_id != stage_id:
        found = "none" if staged is None else repr(staged.stage_id)
        raise EngineError(f"stage {stage_id!r} is not held; staged: {found}")
    return staged


def leading_to(to: VersionRef, last: _Stage | None) -> _Stage:
    """The last commit, if undoing it leads to `to`; or EngineError."""
    if last is None or last.base != to:
        leads = "nowhere" if last is None else f"to {last.base}"
        raise EngineError(f"cannot roll back to {to}: the undo kept leads {leads}")
    return last
