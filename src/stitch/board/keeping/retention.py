"""What retention keeps of a run, and what it would remove. See docs/protocol.md, "Retention"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stitch.board import keys, spans
from stitch.board.keeping.inventory import Inventory
from stitch.board.keeping.retired import Retention, ranges
from stitch.board.routes import AnchorStep, MergedStep, PatchStep, Route, Step, plan_route
from stitch.board.stores.store import ObjectInfo
from stitch.errors import (
    CorruptRecordError,
    NoRouteError,
    UnsupportedFormatError,
    UsageError,
    VersionNotFoundError,
    VersionRemovedError,
)
from stitch.records import AnchorRecord, BlobRef, Heartbeat, Manifest, MergedPatch

if TYPE_CHECKING:
    from stitch.board.log import Run

log = logging.getLogger("stitch.board")

DAY_S = 86_400.0
_UNREADABLE = (VersionNotFoundError, CorruptRecordError, UnsupportedFormatError)


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """What to keep. All times are differences of times that the store gave."""

    keep_versions: int = 256
    """The newest so many versions: from each to each later one, and from the base or an anchor."""
    keep_days: float | None = None
    """Also all versions that are younger than this."""
    keep_anchors: int | None = None
    """The newest so many anchors stay; None: all of them."""
    keep: frozenset[int] = frozenset()
    """Versions that stay reachable whatever their age."""
    replica_ttl_s: float = 900.0
    """A replica whose heartbeat is older is taken for dead; others are not cut off."""
    orphan_age_s: float = DAY_S
    """Blobs that no record names are of a writer that died if they are older than this."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise UsageError(f"keep_versions must be at least 1, got {self.keep_versions}")
        if self.keep_anchors is not None and self.keep_anchors < 0:
            raise UsageError(f"keep_anchors must not be negative, got {self.keep_anchors}")


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """What a policy means for a run as it is."""

    newest: int
    first: int
    """The oldest version of those that are kept without gaps."""
    kept_besides: tuple[int, ...]
    """Older versions that stay reachable: named ones, and those that other runs start from."""
    live: tuple[tuple[str, int], ...]
    """(replica, version) of live replicas, whose ways stay."""
    kept_patches: frozenset[int]
    """Versions up to `first` whose own patches stay."""
    garbage: dict[str, ObjectInfo] = field(default_factory=dict)
    """What is of no use, by key without the run's name."""

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.garbage.values())

    def record(self, run: str, writer: str, now_unix_s: float) -> Retention:
        return Retention(
            run=run,
            first=self.first,
            kept=ranges(set(self.kept_patches)),
            created_unix_s=now_unix_s,
            writer=writer,
        )


def plan_retention(
    run: Run,
    policy: RetentionPolicy,
    inventory: Inventory,
    *,
    marked: frozenset[str] = frozenset(),
) -> RetentionPlan:
    """Find out what may go. Changes nothing.

    `marked` are keys that were garbage before: blobs whose record is gone since then are not taken
    for those of a writer at work.

    Raises NoRouteError if a version that must be kept cannot be reached even now: then nothing is
    removed until somebody writes an anchor.
    """
    return _Planner(run, policy, inventory, marked).plan()


class _Planner:
    """Collects what must stay; all else that may be deleted at all is garbage."""

    def __init__(
        self, run: Run, policy: RetentionPolicy, inventory: Inventory, marked: frozenset[str]
    ) -> None:
        self._marked = marked
        self._run = run
        self._policy = policy
        self._inventory = inventory
        self._newest = run.newest()
        self._patches: set[int] = set()
        self._spans: set[spans.Span] = set()
        self._anchors: set[int] = set()
        self._damaged: set[str] = set()

    def plan(self) -> RetentionPlan:
        first = self._first()
        besides = sorted(v for v in self._policy.keep | self._forks() if v < first)
        live = [(beat.replica, beat.applied) for beat in self._live() if beat.applied is not None]
        self._patches.update(range(first + 1, self._newest + 1))
        self._spans.update(span for span in self._all_spans() if span[0] >= first)
        self._keep_anchors()
        for version in (*besides, first):
            self._keep_ways(version)
        for _, version in live:
            if version < first:
                self._keep_way(version, first)
                self._keep_way(version, self._newest)
        self._keep_way(0, self._newest)
        self._keep_way(None, self._newest)
        return RetentionPlan(
            newest=self._newest,
            first=first,
            kept_besides=tuple(besides),
            live=tuple(live),
            kept_patches=frozenset(v for v in self._patches if v <= first),
            garbage=self._garbage(first),
        )

    # --- what must stay ------------------------------------------------------------------------

    def _first(self) -> int:
        """The oldest version that the policy keeps without gaps, and that is not removed yet."""
        first = max(0, self._newest - self._policy.keep_versions + 1)
        if self._policy.keep_days is not None:
            while first > 0 and self._is_young(first - 1, self._policy.keep_days * DAY_S):
                first -= 1
        before = self._run.retention()
        return first if before is None else min(self._newest, max(first, before.first))

    def _is_young(self, version: int, age_s: float) -> bool:
        """Whether a version is younger; the base is as old as the version after it."""
        info = self._inventory.versions.get(max(1, version), {}).get("manifest.json")
        return info is None or self._inventory.age_s(info) < age_s

    def _forks(self) -> set[int]:
        """Versions of this run that other runs of the board start from."""
        found = set()
        for name in self._run.board.runs():
            if name == self._run.name:
                continue
            parent = self._run.board.open_run(name).record.parent
            if parent is not None and parent.run == self._run.name:
                found.add(parent.version)
        return found

    def _live(self) -> Iterator[Heartbeat]:
        for beat in self._run.heartbeats():
            info = self._inventory.heartbeats.get(beat.replica)
            age_s = 0.0 if info is None else self._inventory.age_s(info)
            if age_s <= self._policy.replica_ttl_s and beat.run == self._run.name:
                yield beat

    def _all_spans(self) -> Iterator[spans.Span]:
        for version, objects in self._inventory.versions.items():
            for name in objects:
                start = keys.parse_merged(name)
                if start is not None and spans.is_span(start, version):
                    yield start, version

    def _keep_anchors(self) -> None:
        versions = self._inventory.versions.items()
        anchored = sorted(version for version, names in versions if "anchor.json" in names)
        many = len(anchored) if self._policy.keep_anchors is None else self._policy.keep_anchors
        self._anchors.update(anchored[len(anchored) - many :] if many else ())

    def _keep_ways(self, version: int) -> None:
        """From the base and from the anchors; one of them must exist."""
        ways = [self._keep_way(None, version), self._keep_way(0, version)]
        if version > 0 and not any(ways):
            raise NoRouteError(
                f"run {self._run.name!r}: version {version} is to be kept, but no route leads to "
                "it from the base or an anchor even now, so nothing is removed; write an anchor of "
                f"a version from {version} on, and keep versions from there"
            )

    def _keep_way(self, have: int | None, want: int) -> bool:
        """Keep the steps of the cheapest route whose blobs are all there; whether there is one."""
        avoid: set[str] = set()
        while True:
            try:
                route = plan_route(self._run, have, want, avoid=frozenset(avoid))
            except (NoRouteError, VersionRemovedError):
                return False
            missing = [step.key for step in route.steps if not self._is_whole(step)]
            if not missing:
                self._keep_route(route)
                return True
            avoid.update(missing)

    def _is_whole(self, step: Step) -> bool:
        blobs = step.record.files if isinstance(step, AnchorStep) else step.record.blobs
        return all(self._inventory.has(step.to_version, ref.name) for ref in blobs)

    def _keep_route(self, route: Route) -> None:
        for step in route.steps:
            if isinstance(step, PatchStep):
                self._patches.add(step.to_version)
            elif isinstance(step, MergedStep):
                self._spans.add((step.from_version, step.to_version))
            else:
                self._anchors.add(step.to_version)

    # --- what may go ---------------------------------------------------------------------------

    def _garbage(self, first: int) -> dict[str, ObjectInfo]:
        kept = self._kept_keys()
        found = {}
        for key, info in self._inventory.deletable().items():
            if key in kept or self._is_damaged(key):
                continue
            is_orphan = key in self._marked or self._is_old(info)
            if is_orphan or self._is_named_no_more(key, first):
                found[key] = info
        return found

    def _is_named_no_more(self, key: str, first: int) -> bool:
        """Whether policy, rather than a writer's death, makes it garbage."""
        _, folder, name = key.split("/")
        version = int(folder)
        if name.startswith("anchor-") or name == "anchor.json":
            return self._inventory.has(version, "anchor.json") and version not in self._anchors
        start = _start_of(name)
        if start is not None:
            record = keys.merged_step(start, version).rsplit("/", 1)[-1]
            listed = self._inventory.has(version, record)
            return listed and (start, version) not in self._spans
        return version <= first and version not in self._patches

    def _is_old(self, info: ObjectInfo) -> bool:
        return self._inventory.age_s(info) > self._policy.orphan_age_s

    def _kept_keys(self) -> set[str]:
        """Keys of all records and blobs that stay. Reads the manifests of what is kept."""
        kept: set[str] = set()
        for version in self._patches:
            manifest = self._read(version, "manifest.json")
            if isinstance(manifest, Manifest):
                kept |= _blob_keys(version, manifest.blobs)
        for start, version in self._spans:
            record = keys.merged_step(start, version)
            kept.add(record)
            merged = self._read(version, record.rsplit("/", 1)[-1])
            if isinstance(merged, MergedPatch):
                kept |= _blob_keys(version, merged.blobs)
        for version in self._anchors:
            kept.add(keys.anchor_step(version))
            anchor = self._read(version, "anchor.json")
            if isinstance(anchor, AnchorRecord):
                kept |= _blob_keys(version, anchor.files)
        return kept

    def _read(self, version: int, name: str) -> Manifest | MergedPatch | AnchorRecord | None:
        """A record; None if it cannot be read: then nothing beside it is touched."""
        try:
            if name == "manifest.json":
                return self._run.manifest(version)
            if name == "anchor.json":
                return self._run.anchor(version)
            return self._run.merged(keys.parse_merged(name) or 0, version)
        except _UNREADABLE as error:
            log.warning("event=unreadable_record_kept error=%s", error)
            self._damaged.add(f"v/{keys.number(version)}/")
            return None

    def _is_damaged(self, key: str) -> bool:
        return key[: len("v/00000000/")] in self._damaged


def _start_of(name: str) -> int | None:
    """The version that a merged patch's record or blob starts from; None for other names."""
    if not name.startswith("from-"):
        return None
    return keys.parse_number(name[len("from-") : len("from-") + 8])


def _blob_keys(version: int, blobs: tuple[BlobRef, ...]) -> set[str]:
    return {f"v/{keys.number(version)}/{ref.name}" for ref in blobs}
