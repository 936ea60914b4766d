"""Answers of ranks that are proven to belong to the call they came for."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.engines.group.workers import WorkersLostError
from stitch.engines.ranks.port import Answer


def own_answers(answers: Sequence[object], *, number: int, method: str, world: int) -> list[Answer]:
    """The answers of all ranks in order; WorkersLostError unless each is of this call."""
    got = [
        (answer.get("call"), answer.get("at_rank")) if isinstance(answer, dict) else answer
        for answer in answers
    ]
    if got != [(number, rank) for rank in range(world)]:
        raise WorkersLostError(
            f"call {number} ({method}) to {world} ranks got answers of other calls or "
            f"ranks: {got!r:.300}"
        )
    return [answer for answer in answers if isinstance(answer, dict)]
