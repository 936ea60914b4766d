"""Planning how to get from one version to another: the cheapest route in bytes.

A route is a path over edges (from version, to version, bytes). Patches are edges from v - 1 to v,
anchors are edges from nothing at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from stitch.board import keys
from stitch.errors import (
    CorruptRecordError,
    NoRouteError,
    UnsupportedFormatError,
    VersionNotFoundError,
)
from stitch.records import AnchorRecord, Manifest
from stitch.types import check_version

if TYPE_CHECKING:
    from stitch.board.log import Run


@dataclass(frozen=True)
class PatchStep:
    """Apply a patch to the version before it."""

    manifest: Manifest

    @property
    def from_version(self) -> int:
        return self.manifest.base_version

    @property
    def to_version(self) -> int:
        return self.manifest.version

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    @property
    def key(self) -> str:
        """What to put into `avoid` if this step turns out bad."""
        return keys.patch_step(self.to_version)


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


Step: TypeAlias = PatchStep | AnchorStep


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

    `avoid` holds the `key` of steps that turned out bad; `v/00000003` alone means both the patch
    and the anchor of version 3. NoRouteError says what is missing. While the patches are smaller
    than the weights, no anchor can be cheaper and none is looked for.
    """
    check_version(want, "wanted version")
    if have == want:
        return Route(())
    trip = _Trip(run, have, want, avoid)
    direct = trip.direct(max_bytes=run.record.num_bytes)
    if direct is not None:
        return direct
    route = cheapest(trip.steps(), have, want)
    if route is None:
        raise NoRouteError(trip.explanation())
    return route


def cheapest(steps: Iterable[Step], have: int | None, want: int) -> Route | None:
    """The route of fewest bytes over `steps`, then of fewest steps; None if there is none."""
    if have == want:
        return Route(())
    leaving: dict[int | None, list[Step]] = {}
    for step in steps:
        leaving.setdefault(step.from_version, []).append(step)
    best: dict[int | None, tuple[int, int]] = {}
    came_by: dict[int, Step] = {}
    queue: list[tuple[int, int, int]] = []

    def reach_from(place: int | None, cost: int, num_steps: int) -> None:
        for step in leaving.get(place, []):
            reached = (cost + step.num_bytes, num_steps + 1)
            if step.to_version not in best or reached < best[step.to_version]:
                best[step.to_version] = reached
                came_by[step.to_version] = step
                heapq.heappush(queue, (*reached, step.to_version))

    if have is not None:
        best[have] = (0, 0)
        reach_from(have, 0, 0)
    reach_from(None, 0, 0)
    while queue:
        cost, num_steps, version = heapq.heappop(queue)
        if version == want:
            return Route(_walk_back(came_by, have, want))
        if (cost, num_steps) == best[version]:
            reach_from(version, cost, num_steps)
    return None


def _walk_back(came_by: dict[int, Step], have: int | None, want: int) -> tuple[Step, ...]:
    steps: list[Step] = []
    place: int | None = want
    while place is not None and place != have:
        steps.append(came_by[place])
        place = steps[-1].from_version
    return tuple(reversed(steps))


class _Trip:
    """Collects the steps between two versions, and remembers what stood in the way."""

    def __init__(self, run: Run, have: int | None, want: int, avoid: frozenset[str]) -> None:
        self._run = run
        self._have = have
        self._want = want
        self._avoid = avoid
        self._obstacles: dict[str, None] = {}

    def direct(self, max_bytes: int) -> Route | None:
        """Patches all the way, if they exist and need at most `max_bytes`."""
        if self._have is None or self._have > self._want:
            return None
        steps: list[Step] = []
        num_bytes = 0
        for version in range(self._want, self._have, -1):
            step = self._patch(version)
            if step is None:
                return None
            steps.append(step)
            num_bytes += step.num_bytes
            if num_bytes > max_bytes:
                return None
        return Route(tuple(reversed(steps)))

    def steps(self) -> list[Step]:
        """Patches and anchors worth considering, found by walking back from `want`.

        The walk ends where no patch leads on, or where the patches walked over cost more than
        the best route found on the way.
        """
        anchors = {version for version in self._run.anchors() if version <= self._want}
        ahead = self._have is not None and self._have < self._want
        bottom = self._have if ahead else min(anchors, default=None)
        if bottom is None:
            return []
        steps: list[Step] = []
        patched_bytes = 0
        best_bytes: float = float("inf")
        for version in range(self._want, bottom - 1, -1):
            if version in anchors:
                anchor = self._anchor(version)
                if anchor is not None:
                    steps.append(anchor)
                    best_bytes = min(best_bytes, patched_bytes + anchor.num_bytes)
            patch = self._patch(version) if version > bottom else None
            if patch is None or patched_bytes >= best_bytes:
                break
            steps.append(patch)
            patched_bytes += patch.num_bytes
        return steps

    def _patch(self, version: int) -> PatchStep | None:
        if self._avoids(version, keys.patch_step(version)):
            self._note(f"the patch of version {version} is known to be bad")
            return None
        try:
            return PatchStep(self._run.manifest(version))
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

    def explanation(self) -> str:
        start = "nothing" if self._have is None else f"version {self._have}"
        reasons = "; ".join(self._obstacles) or "it has no anchor at or below it"
        advice = (
            f"load the run's base ({self._run.record.base}) and start from version 0"
            if self._have is None
            else "an anchor of a later version would help"
        )
        return (
            f"run {self._run.name!r}: no route from {start} to version {self._want}: "
            f"{reasons}; {advice}"
        )
