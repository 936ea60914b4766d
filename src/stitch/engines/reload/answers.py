"""Answers to fixed prompts: what an engine computes with, beyond what it says it holds.

Numbers may differ a little from one time to the next (requests share steps), and where two tokens
are nearly equally likely either may come. Nothing else may differ between the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.engines.reload.stock import StockRefusedError

NUM_TOKENS = 8
TOLERANCE = 0.1
"""Natural logarithms of probabilities are the same within this."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One greedy output token, its log probability, and by how much it led the next likely one."""

    token: int
    logprob: float
    lead: float


Answer = tuple[Step, ...]


def checked(answers: Sequence[Answer], num_prompts: int) -> tuple[Answer, ...]:
    """The answers, if they are whole and finite; StockRefusedError if the engine computes none."""
    for answer in answers:
        if len(answer) != NUM_TOKENS or not all(math.isfinite(step.logprob) for step in answer):
            raise StockRefusedError(f"it answers a fixed prompt with {answer!r:.300}")
    if len(answers) != num_prompts:
        raise StockRefusedError(f"it gives {len(answers)} answers to {num_prompts} prompts")
    return tuple(answers)


def disagreement(wanted: Sequence[Answer], found: Sequence[Answer]) -> str | None:
    """Where two engines with the same weights would not have answered so; None if they may."""
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for at, (step, got) in enumerate(zip(one, other, strict=True)):
            if step.token != got.token:
                if max(step.lead, got.lead) > 2 * TOLERANCE:
                    return f"prompt {number}, token {at}: {got.token} instead of {step.token}"
                break  # a tie; what follows is another text
            if abs(step.logprob - got.logprob) > TOLERANCE:
                return (
                    f"prompt {number}, token {at}: log probability {got.logprob:.3f} instead of "
                    f"{step.logprob:.3f}"
                )
    return None


def exchanged(answers: Sequence[Answer], a: int, b: int) -> tuple[Answer, ...]:
    """The answers once tokens `a` and `b` have changed roles."""
    roles = {a: b, b: a}
    return tuple(
        tuple(
            Step(token=roles.get(s.token, s.token), logprob=s.logprob, lead=s.lead) for s in answer
        )
        for answer in answers
    )
