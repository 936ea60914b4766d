"""What the replicas say on the board, gathered for as long as the demo runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stitch.board import Run
from stitch.records import Heartbeat


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit of one replica. `caught_up`: made while the replica was already serving, so that
    its times tell how fast a new version arrives and not how late the replica joined."""

    replica: str
    version: int
    stage_ms: float
    pause_ms: float
    publish_to_served_s: float
    caught_up: bool


class FleetWatch:
    """Latest heartbeat and all commits of each replica; restarts do not lose earlier commits."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ready_unix_s: dict[str, float] = {}
        self._commits: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        self.beats: dict[str, Heartbeat] = {}

    def look(self) -> None:
        """Read the board once."""
        for beat in self._run.heartbeats():
            self.beats[beat.replica] = beat
            if beat.ready:
                self._ready_unix_s.setdefault(beat.boot, beat.sent_unix_s)
            for record in beat.versions:
                key = (beat.replica, beat.boot, int(record["version"]))
                self._commits.setdefault(key, record)

    def ready_at(self, replica: str, version: int, *, other_than_boot: str | None = None) -> bool:
        """Whether `replica` serves `version` or newer (in a later life than `other_than_boot`)."""
        beat = self.beats.get(replica)
        if beat is None or beat.boot == other_than_boot or not beat.ready:
            return False
        return beat.applied is not None and beat.applied >= version

    def commits(self) -> list[Commit]:
        return [
            self._commit(replica, boot, record)
            for (replica, boot, _), record in sorted(self._commits.items())
        ]

    def _commit(self, replica: str, boot: str, record: Mapping[str, Any]) -> Commit:
        published = float(record["published_unix_s"])
        return Commit(
            replica=replica,
            version=int(record["version"]),
            stage_ms=1000 * float(record["stage_s"]),
            pause_ms=float(record["pause_ms"]),
            publish_to_served_s=float(record["served_unix_s"]) - published,
            caught_up=published >= self._ready_unix_s.get(boot, float("inf")),
        )
