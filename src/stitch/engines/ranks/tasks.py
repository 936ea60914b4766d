"""One call at a time in a thread, so that an engine's steps need not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stitch.engines.ranks.port import Answer, failure
from stitch.errors import UsageError


class Tasks:
    """Calls by ticket. The latest answer is kept until another call begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket: str | None = None
        self._answer: Answer | None = None
        self._thread: threading.Thread | None = None

    def begin(self, ticket: str, call: Callable[[], Answer]) -> None:
        """Start a call; UsageError while another runs. The same ticket again changes nothing."""
        with self._lock:
            if ticket == self._ticket:
                return
            if self._thread is not None and self._thread.is_alive():
                raise UsageError(f"the call {self._ticket!r} is still under way")
            self._ticket, self._answer = ticket, None
            self._thread = threading.Thread(
                target=self._run, args=(ticket, call), name="stitch-rank", daemon=True
            )
            self._thread.start()

    def _run(self, ticket: str, call: Callable[[], Answer]) -> None:
        try:
            answer = call()
        except BaseException as error:  # the answer is how this thread reports
            answer = failure(error)
        with self._lock:
            if ticket == self._ticket:
                self._answer = answer

    def finish(self, ticket: str, wait_s: float) -> Answer:
        """The call's answer, or that it is running; UsageError for an unknown ticket."""
        with self._lock:
            if ticket != self._ticket or self._thread is None:
                raise UsageError(f"no call {ticket!r} was begun")
            thread = self._thread
        if wait_s > 0:
            thread.join(wait_s)
        with self._lock:
            return self._answer if self._answer is not None else {"ok": True, "running": True}
