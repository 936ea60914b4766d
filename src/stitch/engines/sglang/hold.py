"""Hold: the scheduler's own thread, lent to us between two steps.

A pause reaches all schedulers of an engine in the same round of their loops, before the messages
that synchronise the next one. There each of them stays in `enter`, doing what another thread asks
for by `run`, until `release`: no step can come in between, on no rank, and nobody waits in a
message for a rank that is busy with its weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stitch.engines.ranks.port import Answer, failure
from stitch.errors import EngineError


class Hold:
    """One scheduler's; `enter` is called in its thread, everything else in one other thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected = False
        self._held = False
        self._call: Callable[[], Answer] | None = None
        self._answer: Answer | None = None

    def expect(self) -> None:
        """The next pause is ours."""
        with self._changed:
            self._expected = True

    def enter(self) -> None:
        """Called when the scheduler has paused: stay here until released, if it was expected."""
        with self._changed:
            if not self._expected:
                return
            self._expected, self._held = False, True
            self._changed.notify_all()
        while (call := self._next()) is not None:
            try:
                answer = call()
            except BaseException as error:  # whoever asked must hear of it, and the hold go on
                answer = failure(error)
            with self._changed:
                self._call, self._answer = None, answer
                self._changed.notify_all()

    def _next(self) -> Callable[[], Answer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._call is not None or not self._held)
            return self._call

    def run(self, call: Callable[[], Answer], wait_s: float = 0.0) -> Answer:
        """What `call` answers in the scheduler's thread, once it is held.

        EngineError if that is not so within `wait_s`; then nothing was called.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._held, wait_s):
                raise EngineError(f"the scheduler is not paused (waited {wait_s:g} s)")
            self._call, self._answer = call, None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer is not None)
            assert self._answer is not None
            return self._answer

    def release(self) -> None:
        """Let the scheduler go on; a pause still to come is no longer ours."""
        with self._changed:
            self._expected = self._held = False
            self._changed.notify_all()

    @property
    def is_held(self) -> bool:
        with self._changed:
            return self._held
