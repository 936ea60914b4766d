"""What a client can be told; see :class:`ClientConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.config import setting
from stitch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Settings of :class:`stitch.Client`, each also `STITCH_CLIENT_<NAME>`. Times in seconds."""

    deadline_s: float = setting(60.0, help="give up on a request after this long")
    attempt_timeout_s: float | None = setting(
        None, help="ask another replica when one has not answered for this long"
    )
    connect_timeout_s: float = setting(5.0, help="give up on connecting to a replica")
    refresh_s: float = setting(1.0, help="read the replicas' heartbeats this often")
    stale_after_s: float = setting(
        20.0, help="a replica whose heartbeat stands still for this long counts as lost"
    )
    max_in_flight: int = setting(256, help="requests sent at the same time; more wait their turn")
    token: str | None = setting(None, help="bearer token sent to replicas", secret=True)

    def __post_init__(self) -> None:
        for name in ("deadline_s", "connect_timeout_s", "refresh_s", "stale_after_s"):
            positive(getattr(self, name), name)
        positive(self.max_in_flight, "max_in_flight")
        if self.attempt_timeout_s is not None:
            positive(self.attempt_timeout_s, "attempt_timeout_s")


def positive(value: float, name: str) -> float:
    """Return `value`, or raise UsageError unless it is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{name} must be a number above zero, got {value!r}")
    return value
