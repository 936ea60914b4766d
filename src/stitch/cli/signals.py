"""Ending a verb that goes on until it is stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopping(stopped: threading.Event, follows: bool) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM set `stopped`, if the verb `follows` something."""
    if not follows:
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: stopped.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
