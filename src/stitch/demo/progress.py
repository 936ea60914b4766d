"""What the demo says while it runs: one line an event, and on a terminal a status line below."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.status import Status

from stitch.demo.output import plain_console
from stitch.records import Heartbeat
from stitch.types import ReplicaState


class Progress:
    """Lines with the seconds since the start. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or plain_console()
        self._began_s = time.monotonic()
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._began_s
        self._console.print(f"[{seconds:6.1f} s] {text}", markup=False)

    def step(self, event: Mapping[str, Any]) -> None:
        """One line for an optimiser step of the trainer."""
        versions = ", ".join(map(str, event["sample_versions"]))
        self.say(
            f"step {event['step']:2}: reward {event['reward']:.3f}, "
            f"{event['accuracy']:.0%} right, loss {event['loss']:+.4f}, "
            f"samples from version {versions or '-'}"
        )

    def status(self, newest: int, beats: Mapping[str, Heartbeat]) -> None:
        """Refresh the status line; nothing on a plain output."""
        if self._status is not None:
            replicas = " · ".join(_short(beat) for _, beat in sorted(beats.items()))
            self._status.update(f"newest version {newest} · {replicas or 'no replica yet'}")


def _short(beat: Heartbeat) -> str:
    applied = "-" if beat.applied is None else str(beat.applied)
    if beat.state is ReplicaState.SERVING:
        return f"{beat.replica} at {applied}"
    return f"{beat.replica} at {applied} ({beat.state.value.lower().replace('_', ' ')})"
