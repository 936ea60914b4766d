"""Planning how to get from one version to another: the cheapest route in bytes.

A route is a row of steps: patches lead from v - 1 to v, merged patches over a span of versions, and
anchors from nothing at all to their version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stitch.board import keys, spans
from stitch.errors import (
    CorruptRecordError,
    NoRouteError,
    UnsupportedFormatError,
    VersionNotFoundError,
    VersionRemovedError,
)
from stitch.records import AnchorRecord, Manifest, MergedPatch, PatchRecord
from stitch.types import check_version

if TYPE_CHECKING:
    from stitch.board.keeping.retired import Retention
    from stitch.board.log import Run


@dataclass(frozen=True)
class _OverPatch:
    """Apply a patch, merged or not, to the version that it starts from."""

    record: PatchRecord

    @property
    def from_version(self) -> int:
        return self.record.base_version

    @property
    def to_version(self) -> int:
        return self.record.version

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes


@dataclass(frozen=True)
class PatchStep(_OverPatch):
    """Apply a patch to the version before it."""

    record: Manifest

    @property
    def key(self) -> str:
        """What to put into `avoid` if this step turns out bad."""
        return keys.patch_step(self.to_version)


@dataclass(frozen=True)
class MergedStep(_OverPatch):
    """Apply a merged patch to the version that it starts from."""

    record: MergedPatch

    @property
    def key(self) -> str:
        """What to put into `avoid` if this step turns out bad."""
        return keys.merged_step(self.from_version, self.to_version)


@dataclass(frozen=True)
class AnchorStep:
    """Load a version whole, whatever is held before."""

    record: AnchorRecord

    @property
    def from_version(self) -> None:
        return None

    @property
    def to_version(self) -> int:
        return self.record.version

    @property
    def num_bytes(self) -> int:
        return self.record.num_bytes

    @property
    def key(self) -> str:
        """What to put into `avoid` if this step turns out bad."""
        return keys.anchor_step(self.to_version)


Step: TypeAlias = PatchStep | MergedStep | AnchorStep


@dataclass(frozen=True)
class Route:
    """Steps to take in order; none if the wanted version is held already."""

    steps: tuple[Step, ...]

    @property
    def num_bytes(self) -> int:
        return sum(step.num_bytes for step in self.steps)


def plan_route(
    run: Run, have: int | None, want: int, *, avoid: frozenset[str] = frozenset()
) -> Route:
    """The cheapest route from version `have` (None: nothing usable) to `want`.

    `avoid` holds the `key` of steps that turned out bad; `v/00000003` alone means all steps that
    lead to version 3. NoRouteError says what is missing; VersionRemovedError, that retention has
    removed the wanted version. Where merged patches exist, a route over k versions has O(log k)
    steps and is found in as many requests. While the patches are smaller than the weights, no
    anchor can be cheaper and none is looked for.
    """
    check_version(want, "wanted version")
    if have == want:
        return Route(())
    is_next = have is not None and have + 1 == want
    retention = None if is_next else run.retention()
    trip = _Trip(run, want, avoid, retention)
    route = _best(trip, have)
    if route is None and retention is not None:
        # What retention is about to remove may still be there: here that is looked up.
        route = _best(_Trip(run, want, avoid, retention, last_resort=True), have)
    if route is None:
        retention = retention or run.retention()
        if retention is not None and want < retention.first:
            raise VersionRemovedError(
                f"version {want} of run {run.name!r} was removed by retention, which keeps "
                f"versions from {retention.first} on ({trip.explanation(have)})"
            )
        raise NoRouteError(trip.explanation(have))
    return route


def _best(trip: _Trip, have: int | None) -> Route | None:
    """The cheapest route of a trip from version `have`."""
    start = have if have is not None and have < trip.want else None
    if start is not None:
        direct = trip.over_patches(start, trip.whole_bytes)
        if direct is not None:
            return direct
    best = trip.over_anchors()
    if start is None:
        return best
    limit = float("inf") if best is None else best.num_bytes
    return trip.over_patches(start, limit) or best


class _Trip:
    """Looks for steps that lead to one version, and remembers what stood in the way."""

    def __init__(
        self,
        run: Run,
        want: int,
        avoid: frozenset[str],
        retention: Retention | None,
        *,
        last_resort: bool = False,
    ) -> None:
        self.want = want
        self.whole_bytes = run.record.num_bytes
        self._run = run
        self._avoid = avoid
        self._retention = retention
        self._last_resort = last_resort
        self._obstacles: dict[str, None] = {}
        self._onward: dict[int, Step | None] = {}

    def over_patches(self, have: int, max_bytes: float) -> Route | None:
        """Patches and merged patches all the way, if they need at most `max_bytes`.

        The longest span each time: spans are nested or apart, and a merged patch is no larger than
        what it stands for, so this is the cheapest way, and a way if there is one.
        """
        steps: list[Step] = []
        place, num_bytes = have, 0
        while place < self.want:
            step = self._longest(place)
            if step is None:
                return None
            steps.append(step)
            place = step.to_version
            num_bytes += step.num_bytes
            if num_bytes > max_bytes:
                return None
        return Route(tuple(steps))

    def over_anchors(self) -> Route | None:
        """The cheapest route that begins with an anchor, if there is one.

        Only where the hint at the anchors leads nowhere they are listed.
        """
        hinted = self._run.hinted_anchors()
        best = None if hinted is None else self._over_some(hinted)
        return best or self._over_some(self._run.anchors())

    def _over_some(self, anchors: list[int]) -> Route | None:
        """From the newest anchor down, until the patches after one alone cost more than the best
        route so far."""
        best: Route | None = None
        for version in sorted(anchors, reverse=True):
            if version > self.want:
                continue
            limit = float("inf") if best is None else best.num_bytes
            after = self.over_patches(version, limit)
            if after is None and best is not None:
                break
            anchor = self._anchor(version) if after is not None else None
            if after is None or anchor is None:
                continue
            route = Route((anchor, *after.steps))
            if best is None or route.num_bytes < best.num_bytes:
                best = route
        return best

    def _longest(self, place: int) -> Step | None:
        if place not in self._onward:
            ways = (self._merged(place, end) for end in spans.ends(place, self.want))
            merged = next((way for way in ways if way is not None), None)
            self._onward[place] = merged or self._patch(place + 1)
        return self._onward[place]

    def _merged(self, start: int, version: int) -> MergedStep | None:
        if self._avoids(version, keys.merged_step(start, version)):
            self._note(f"the merged patch from {start} to {version} is known to be bad")
            return None
        try:
            record = self._run.merged(start, version)
        except (VersionNotFoundError, CorruptRecordError, UnsupportedFormatError) as error:
            self._note(str(error))
            return None
        return None if record is None else MergedStep(record)

    def _patch(self, version: int) -> PatchStep | None:
        if self._avoids(version, keys.patch_step(version)):
            self._note(f"the patch of version {version} is known to be bad")
            return None
        is_kept = self._retention is None or self._retention.has_patch(version)
        try:
            if is_kept or (self._last_resort and self._run.has_blobs(version)):
                return PatchStep(self._run.manifest(version))
            self._note(f"the patch of version {version} was removed by retention")
            return None
        except (VersionNotFoundError, CorruptRecordError, UnsupportedFormatError) as error:
            self._note(str(error))
            return None

    def _anchor(self, version: int) -> AnchorStep | None:
        if self._avoids(version, keys.anchor_step(version)):
            self._note(f"the anchor of version {version} is known to be bad")
            return None
        try:
            record = self._run.anchor(version)
        except (CorruptRecordError, UnsupportedFormatError) as error:
            self._note(str(error))
            return None
        return None if record is None else AnchorStep(record)

    def _note(self, obstacle: str) -> None:
        self._obstacles[obstacle] = None

    def _avoids(self, version: int, key: str) -> bool:
        return key in self._avoid or f"v/{keys.number(version)}" in self._avoid

    def explanation(self, have: int | None) -> str:
        start = "nothing" if have is None else f"version {have}"
        reasons = "; ".join(self._obstacles) or "it has no anchor at or below it"
        advice = (
            f"load the run's base ({self._run.record.base}) and start from version 0"
            if have is None
            else "an anchor of a later version would help"
        )
        return (
            f"run {self._run.name!r}: no route from {start} to version {self.want}: "
            f"{reasons}; {advice}"
        )
