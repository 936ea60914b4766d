"""Which replicas there are, which are alive, and which one to ask next.

Pure bookkeeping: no input or output, the clock and the dice are handed in. Whether a replica is
alive is judged by its heartbeat's sequence number changing on *our* clock; what other hosts think
the time is never matters (two hosts' clocks may differ by hours).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from stitch.records import Heartbeat
from stitch.types import VersionConstraint

FIRST_ASIDE_S = 0.5
"""How long a replica is put aside after its first failure; doubles with each further one."""
LONGEST_ASIDE_S = 30.0


@dataclass(kw_only=True)
class Member:
    """What this client knows of one replica."""

    beat: Heartbeat
    changed_s: float
    """Our clock when the heartbeat last changed, or when it was first seen."""
    confirmed: bool = False
    """Whether the heartbeat was seen to change; before that it may be a dead replica's last one."""
    stale: bool = False
    outstanding: int = 0
    penalty: float = 0.0
    """Grows by one with each failure, halves with each success."""
    timeouts: int = 0
    """Answers in a row that did not come in time."""
    failed_at_s: float = -math.inf
    """Our clock at the last failure or time-out that was counted."""
    aside_until_s: float = -math.inf
    last_answer: str = ""
    learned: int | None = field(default=None, repr=False)
    """A version that its own answers showed, newer knowledge than the heartbeat's."""
    learned_at_seq: int = field(default=0, repr=False)

    @property
    def id(self) -> str:
        return self.beat.replica

    @property
    def applied(self) -> int | None:
        return self.beat.applied if self.learned is None else self.learned

    def learn(self, version: int | None) -> None:
        """Remember a version seen in an answer until two further heartbeats came."""
        self.learned, self.learned_at_seq = version, self.beat.seq


class Fleet:
    """The replicas of one run, from heartbeats and from how they answered."""

    def __init__(
        self,
        *,
        stale_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
    ) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._dice = dice or random.Random()
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def now(self) -> float:
        return self._clock()

    def observe(self, beats: Iterable[Heartbeat]) -> list[str]:
        """Take in one successful reading of all heartbeats; return the ids just lost.

        A replica is *lost* when its heartbeat has stood still too long. While the board cannot
        be read nothing is observed, so nobody is lost for that reason.
        """
        now = self._clock()
        seen: dict[str, Member] = {}
        for beat in beats:
            member = self._members.get(beat.replica)
            seen[beat.replica] = _updated(member, beat, now)
        lost = []
        for member in seen.values():
            stale = now - member.changed_s > self._stale_after_s
            if stale and not member.stale:
                lost.append(member.id)
            member.stale = stale
        self._members = seen
        return lost

    def choose(self, constraint: VersionConstraint, exclude: Collection[str] = ()) -> Member | None:
        """The replica to ask next, or None when all are excluded.

        The best class of replicas that has any: not put aside, alive, ready, on a version that
        meets the constraint. In it the less loaded of two picked at random, so that many clients
        with the same view do not all run to the same replica.
        """
        now = self._clock()
        candidates = [m for m in self._members.values() if m.id not in exclude]
        if not candidates:
            return None
        best = min(self._rank(m, constraint, now) for m in candidates)
        peers = [m for m in candidates if self._rank(m, constraint, now) == best]
        pair = self._dice.sample(peers, min(2, len(peers)))
        return min(pair, key=lambda m: m.outstanding)

    def _rank(
        self, member: Member, constraint: VersionConstraint, now: float
    ) -> tuple[bool, bool, bool, bool, bool]:
        return (
            member.aside_until_s > now,
            member.stale,
            not member.beat.ready,
            constraint.unmet_by(member.applied, member.beat.run) is not None,
            not member.confirmed,
        )

    def all_past(self, constraint: VersionConstraint) -> bool:
        """Whether every replica already serves a newer version than the exact one wanted."""
        exact = constraint.exact_version
        run = constraint.run
        if run is not None and any(m.beat.run != run for m in self._members.values()):
            return False  # one may yet go over to that run
        versions = [m.applied for m in self._members.values() if not m.stale]
        return (
            exact is not None
            and bool(versions)
            and all(v is not None and v > exact for v in versions)
        )

    def has_other_alive(self, replica: str) -> bool:
        return any(not m.stale for m in self._members.values() if m.id != replica)

    def succeeded(self, member: Member, version: int | None) -> None:
        """It answered. One success does not clear a bad record: a flapping replica stays aside."""
        member.penalty /= 2
        member.timeouts = 0
        if version is not None and (member.applied is None or version > member.applied):
            member.learn(version)

    def started(self, member: Member) -> float:
        """Note that an attempt begins; returns our clock, to be handed back if it fails."""
        member.outstanding += 1
        return self._clock()

    def ended(self, member: Member) -> None:
        member.outstanding -= 1

    def failed(self, member: Member, started_s: float) -> None:
        """It could not be reached, broke off or failed: put it aside, longer each time.

        Attempts that were under way together and fail together count once.
        """
        if started_s <= member.failed_at_s:
            return
        member.failed_at_s = self._clock()
        self._penalise(member)

    def timed_out(self, member: Member, started_s: float) -> None:
        """It did not answer in time. One slow answer is no failure; two in a row are."""
        if started_s <= member.failed_at_s:
            return
        member.failed_at_s = self._clock()
        member.timeouts += 1
        if member.timeouts > 1:
            self._penalise(member)

    def _penalise(self, member: Member) -> None:
        member.penalty += 1
        span_s = min(LONGEST_ASIDE_S, FIRST_ASIDE_S * 2 ** (member.penalty - 1))
        self.put_aside(member, span_s * self._dice.uniform(0.75, 1.25))

    def put_aside(self, member: Member, span_s: float) -> None:
        """Prefer others for `span_s` seconds; it is still asked when nobody else is left."""
        member.aside_until_s = max(member.aside_until_s, self._clock() + span_s)


def _updated(member: Member | None, beat: Heartbeat, now: float) -> Member:
    if member is None:
        return Member(beat=beat, changed_s=now)
    if (beat.boot, beat.run) != (member.beat.boot, member.beat.run):
        member.confirmed, member.changed_s, member.learned = True, now, None
        member.timeouts = 0
    elif beat.seq != member.beat.seq:
        member.confirmed, member.changed_s = True, now
        if beat.seq - member.learned_at_seq >= 2:
            member.learned = None
    member.beat = beat
    return member
