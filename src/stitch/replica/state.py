"""What a replica is doing, in one place: read by the gate, the endpoints, heartbeats and metrics.

The reconciler and the watchdog write it; both live on the event loop, so there are no locks.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from stitch.engines.port import EngineDescription
from stitch.types import ReplicaState, VersionRef

MAX_COMMITS = 32
"""Commits whose timings are kept and sent with each heartbeat."""

WORKING_STATES = frozenset({
    ReplicaState.SERVING, ReplicaState.FETCHING, ReplicaState.STAGING, ReplicaState.COMMITTING,
    ReplicaState.ERROR,
})  # fmt: skip
"""States in which the engine serves a proven version. ERROR is one: the update failed, what is
served has not changed, and a bad publish must not take the whole fleet out of service. How far it
may fall behind is the lag policy's matter."""


@dataclass(frozen=True, kw_only=True)
class CommitTiming:
    """What one commit cost. `fetch_s` includes decoding and proving; times are Unix seconds."""

    version: int
    from_version: int
    num_changed: int
    fetch_s: float
    stage_s: float
    pause_ms: float
    bytes_fetched: int
    published_unix_s: float
    served_unix_s: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@functools.lru_cache(maxsize=8)
def version_ref(run: str, version: int) -> VersionRef:
    """Checked once per version instead of once per request."""
    return VersionRef(run, version)


@dataclass(kw_only=True)
class ReplicaStatus:
    """The replica's present. `applied` is what the engine serves, None until proven."""

    replica: str
    max_lag: int | None = None
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    state: ReplicaState = ReplicaState.BOOTING
    doing: str = "waiting for the engine"
    run: str | None = None
    applied: int | None = None
    newest: int | None = None
    in_doubt: VersionRef | None = None
    """A version that the engine may serve though `applied` is another: while a commit is under way,
    and after one whose outcome is not known. Nothing is admitted until it is."""
    caught_up: bool = False
    """Whether the first catch-up has ended; before that no request is served."""
    blocked: str = ""
    """Why no newer version than `applied` can be reached, while that is so."""
    engine_down_since_s: float | None = None
    """Monotonic time since when the engine does not answer."""
    last_error: str = ""
    engine: EngineDescription | None = None
    commits: deque[CommitTiming] = field(default_factory=lambda: deque(maxlen=MAX_COMMITS))
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def move(self, state: ReplicaState, doing: str = "") -> None:
        """Enter `state`; those who listen (the heartbeat) hear of every change."""
        changed = (state, doing) != (self.state, self.doing)
        self.state, self.doing = state, doing
        if changed:
            self.tell()

    def tell(self) -> None:
        for listener in self.listeners:
            listener()

    def note_error(self, error: BaseException) -> None:
        self.last_error = describe_error(error)

    @property
    def ref(self) -> VersionRef | None:
        """The version that is served, once requests are admitted to it."""
        if self.run is None or self.applied is None or not self.caught_up:
            return None
        if self.in_doubt is not None:
            return None
        return version_ref(self.run, self.applied)

    @property
    def lag(self) -> int | None:
        """Versions behind the newest one seen."""
        if self.applied is None or self.newest is None:
            return None
        return max(0, self.newest - self.applied)

    @property
    def ready(self) -> bool:
        """Whether it should get traffic."""
        return self.reason == ""

    @property
    def reason(self) -> str:
        """Why it should get none; empty when it should."""
        if self.state is ReplicaState.FAILED:
            return self.last_error or "failed"
        if self.engine_down_since_s is not None:
            silent_s = time.monotonic() - self.engine_down_since_s
            return f"the engine has not answered for {silent_s:.0f} s: {self.last_error}"
        if not self.caught_up or self.state not in WORKING_STATES:
            return self._why(self.doing or self.state.value.lower().replace("_", " "))
        lag = self.lag or 0
        if self.max_lag is not None and lag > self.max_lag:
            why = self.blocked or self.doing or "catching up"
            return f"{lag} version{'s' * (lag != 1)} behind: {why}"
        return ""

    def _why(self, doing: str) -> str:
        return f"{doing}; {self.blocked}" if self.blocked and self.blocked not in doing else doing


def describe_error(error: BaseException) -> str:
    """`CorruptBlobError: ...`: class and message, on one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:2000]
