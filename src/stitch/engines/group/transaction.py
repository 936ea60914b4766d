"""What happens in a pause: all ranks do it, or all of them are as before."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stitch import failpoints
from stitch.engines.group.workers import Workers
from stitch.engines.ranks.port import Answer, error_of
from stitch.errors import EngineError, FatalReplicaError, StitchError
from stitch.types import VersionRef

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`fault`: what failed, all ranks being as before; None if all of them did their part.

    `pause_ms`: from the call that stops the engine to the end of the one that lets it go on.
    """

    fault: str | None
    pause_ms: float


async def transact(
    workers: Workers, *, what: str, do: str, undo: str, stage_id: str, label: VersionRef
) -> Outcome:
    """Pause, `do` on all ranks, label, resume; where a rank fails, `undo` on all of them instead.

    Raises (anything) when what the ranks hold, or whether the engine goes on, is not known.
    """
    start = time.perf_counter()
    try:
        await workers.pause()
    except Exception as error:  # nothing is written yet: if it goes on, it goes on as it was
        await workers.resume()
        return Outcome(fault=f"the engine did not pause: {error!r}", pause_ms=_ms_since(start))
    failpoints.reach("engine.paused")
    stopped = time.perf_counter()
    answers = await workers.call(do, stage_id)
    wrong = _errors(answers)
    if do == "undo" and not all(answer.get("undone") for answer in answers):
        wrong.append(EngineError("not all ranks had something to undo"))
    failpoints.reach("engine.written")
    if wrong:
        await _undo(workers, undo, stage_id, wrong)
    else:
        await workers.label(label)
    written = time.perf_counter()
    await workers.resume()
    pause_ms = _ms_since(start)
    _log.info(
        "event=transaction what=%r ok=%s pause_ms=%.2f stop_ms=%.2f write_ms=%.2f go_on_ms=%.2f "
        "slowest_write_ms=%.2f",
        what, not wrong, pause_ms, (stopped - start) * 1e3, (written - stopped) * 1e3,
        _ms_since(written), _slowest(answers, "write_ms"),
    )  # fmt: skip
    return Outcome(fault=_text(wrong) if wrong else None, pause_ms=pause_ms)


async def _undo(workers: Workers, undo: str, stage_id: str, wrong: Sequence[StitchError]) -> None:
    """Raises FatalReplicaError when a rank is in doubt, or cannot be brought back."""
    if any(isinstance(error, FatalReplicaError) for error in wrong):
        raise FatalReplicaError(_text(wrong))
    still = _errors(await workers.call(undo, stage_id))
    if still:
        raise FatalReplicaError(f"{_text(wrong)}; and it could not be undone: {_text(still)}")


def _errors(answers: Sequence[Answer]) -> list[StitchError]:
    found = (error_of(answer, f"rank {rank}") for rank, answer in enumerate(answers))
    return [error for error in found if error is not None]


def _text(errors: Sequence[StitchError]) -> str:
    return "; ".join(str(error) for error in errors[:4])


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def _slowest(answers: Sequence[Answer], key: str) -> float:
    return max((float(answer.get(key, 0.0)) for answer in answers), default=0.0)
