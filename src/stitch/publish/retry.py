"""Trying a store operation again, within bounds."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stitch.errors import RetryableError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long one store operation is tried before its error is passed on."""

    max_attempts: int = 5
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    budget_s: float = 60.0
    """No new attempt starts later than this after the first one."""

    def run(
        self,
        what: str,
        call: Callable[[], Result],
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> Result:
        """Return `call()`; after a RetryableError wait (doubling, with jitter) and call again.

        Raises the last RetryableError when attempts or time are used up; other errors at once.
        """
        started_s = time.monotonic()
        for attempt in range(1, self.max_attempts + 1):
            try:
                return call()
            except RetryableError as error:
                delay_s = min(self.max_delay_s, self.first_delay_s * 2 ** (attempt - 1))
                delay_s *= random.uniform(0.5, 1.0)
                late = time.monotonic() - started_s + delay_s > self.budget_s
                if attempt == self.max_attempts or late:
                    raise
                log.warning(
                    "event=retry what=%s attempt=%d delay_s=%.2f error=%s",
                    what, attempt, delay_s, error,
                )  # fmt: skip
                pause(delay_s)
        raise AssertionError("max_attempts must be at least 1")

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
