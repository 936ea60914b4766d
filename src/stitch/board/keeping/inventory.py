"""Everything of one run that retention looks at, from a listing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stitch.board import keys
from stitch.board.keeping import retired
from stitch.board.stores.store import ObjectInfo

if TYPE_CHECKING:
    from stitch.board.log import Run


@dataclass(kw_only=True)
class Inventory:
    """Objects by version and name, as a listing showed them.

    A listing may leave something out. What is not seen here is not deleted, and a route that needs
    it is not relied on.
    """

    versions: dict[int, dict[str, ObjectInfo]] = field(default_factory=lambda: defaultdict(dict))
    marks: list[ObjectInfo] = field(default_factory=list)
    heartbeats: dict[str, ObjectInfo] = field(default_factory=dict)
    """By replica id."""
    latest_unix_s: float | None = None
    """The latest time at which anything here was written, by the store's clock."""

    @classmethod
    def of(cls, run: Run) -> Inventory:
        """List the run. Requests: one for about a thousand objects."""
        found = cls()
        store, name = run.board.store, run.name
        for folder_of in (keys.versions_folder, keys.marks_folder, keys.heartbeats_folder):
            for info in store.list_objects(folder_of(name)):
                found._add(info)
        return found

    def _add(self, info: ObjectInfo) -> None:
        self.saw(info)
        match info.key.split("/"):
            case [_, "v", folder, name]:
                version = keys.parse_number(folder)
                if version is not None:
                    self.versions[version][name] = info
            case [_, "gc", _]:
                self.marks.append(info)
            case [_, "replicas", name]:
                self.heartbeats[name.removesuffix(".json")] = info

    def saw(self, info: ObjectInfo) -> None:
        """The store's clock is at least as late as this object's time."""
        if info.modified_unix_s is not None:
            self.latest_unix_s = max(self.latest_unix_s or 0.0, info.modified_unix_s)

    def has(self, version: int, name: str) -> bool:
        return name in self.versions.get(version, {})

    def age_s(self, info: ObjectInfo) -> float:
        """Seconds since it was written, by the store's clock alone, or less; 0 if not known."""
        if info.modified_unix_s is None or self.latest_unix_s is None:
            return 0.0
        return max(0.0, self.latest_unix_s - info.modified_unix_s)

    def deletable(self) -> dict[str, ObjectInfo]:
        """Objects that retention may ever delete, by key without the run's name."""
        return {
            key: info
            for version, objects in self.versions.items()
            for name, info in objects.items()
            if retired.is_deletable(key := f"v/{keys.number(version)}/{name}")
        }
