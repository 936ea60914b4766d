"""The task: two-digit addition, with a reward that a program can check.

The exact sum earns 1. What is near earns part of it, and two small terms (how much of the text is
digits, how long it is) keep answers of one group apart, since a group in which all rewards are
equal teaches nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

STOP = "\n"
"""Ends an answer."""
NUMBER = re.compile(r"[0-9]+")
DIGITS_SHARE = 0.3
NUMBER_BONUS = 0.1
FORM_SHARE = 0.05
COST_PER_TOKEN = 0.002


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`left + right`, both of two digits."""

    left: int
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def prompt(self) -> str:
        """One solved line, which a small model needs to keep to the form, and the open one."""
        return f"12 + 35 = 47\n{self.left} + {self.right} ="


def problems(step: int, count: int, seed: int = 0) -> list[Problem]:
    """The problems of one training step; the same for the same arguments."""
    generator = random.Random(f"{seed}/{step}")
    return [
        Problem(left=generator.randint(10, 49), right=generator.randint(10, 49))
        for _ in range(count)
    ]


def reward(problem: Problem, text: str, num_tokens: int) -> float:
    """1 for the sum as the last number of `text`, less for near misses, minus a cost per token."""
    cost = COST_PER_TOKEN * num_tokens
    return _correctness(problem, text) + FORM_SHARE * _share_of_digits(text) - cost


def is_correct(problem: Problem, text: str) -> bool:
    return _last_number(text) == str(problem.answer)


def _correctness(problem: Problem, text: str) -> float:
    found = _last_number(text)
    if found is None:
        return 0.0
    wanted = str(problem.answer)
    if found == wanted:
        return 1.0
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    return NUMBER_BONUS + DIGITS_SHARE * right / max(len(found), len(wanted))


def _last_number(text: str) -> str | None:
    numbers = NUMBER.findall(text)
    return numbers[-1].lstrip("0") or "0" if numbers else None


def _share_of_digits(text: str) -> float:
    return sum(c.isascii() and c.isdigit() for c in text) / len(text) if text else 0.0
