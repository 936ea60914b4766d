"""The records of retention: what was removed, and what is marked to be deleted."""

from __future__ import annotations

import bisect
import logging
import re
from dataclasses import dataclass
from itertools import pairwise

from stitch.board import keys
from stitch.board.hints import read_hint
from stitch.board.stores.store import ObjectStore
from stitch.records import FORMAT
from stitch.strict_json import Fields, canonical_json
from stitch.types import BLOB_NAME

MAX_RETENTION_BYTES = 16 * 2**20
MAX_MARK_BYTES = 64 * 2**20

_ABOVE_ALL = 10**9
"""Above every version."""

_DELETABLE = re.compile(
    rf"v/[0-9]{{8}}/(?:anchor\.json|from-[0-9]{{8}}\.json|{BLOB_NAME.pattern}\.(?:patch|safetensors)"
    r"|anchor-[0-9A-Za-z]+-model\.safetensors\.index\.json)",
    re.ASCII,
)
"""Keys in a run that retention may ever delete: no manifest, no record of the run."""


def is_deletable(key: str) -> bool:
    """Whether retention may delete this key of a run (without the run's name)."""
    return _DELETABLE.fullmatch(key) is not None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """`retention.json`: the patches of versions up to `first` are gone, or about to go.

    `first` is the oldest version that is kept, `kept` are ranges (first, last) of versions up to it
    whose own patches stay.
    """

    run: str
    first: int
    kept: tuple[tuple[int, int], ...]
    created_unix_s: float
    writer: str
    format: int = FORMAT

    def has_patch(self, version: int) -> bool:
        """Whether the patch that leads to `version` from the one before is still to be used."""
        if version > self.first:
            return True
        at = bisect.bisect_right(self.kept, (version, _ABOVE_ALL)) - 1
        return at >= 0 and version <= self.kept[at][1]

    def to_json_bytes(self) -> bytes:
        kept = [{"first": first, "last": last} for first, last in self.kept]
        return canonical_json(vars(self) | {"kept": kept})

    @classmethod
    def parse(cls, data: bytes, key: str) -> Retention:
        fields = Fields.of_record(data, key, FORMAT)
        kept = [(r.version("first", low=1), r.version("last")) for r in fields.children("kept")]
        is_apart = all(before[1] < after[0] for before, after in pairwise(kept))
        if any(first > last for first, last in kept) or not is_apart:
            raise fields.error("kept", "is not a list of ascending ranges")
        return cls(
            run=fields.run_name("run"),
            first=fields.version("first"),
            kept=tuple(kept),
            created_unix_s=fields.number("created_unix_s"),
            writer=fields.text("writer"),
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """`gc/<name>.json`: keys in the run (without its name) that are garbage as it is written."""

    run: str
    keys: tuple[str, ...]
    created_unix_s: float
    writer: str
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(vars(self))

    @classmethod
    def parse(cls, data: bytes, key: str) -> Mark:
        fields = Fields.of_record(data, key, FORMAT)
        listed = fields.items("keys", str, is_deletable, "a key that may be deleted")
        return cls(
            run=fields.run_name("run"),
            keys=listed,
            created_unix_s=fields.number("created_unix_s"),
            writer=fields.text("writer"),
        )


def ranges(versions: set[int]) -> tuple[tuple[int, int], ...]:
    """The same versions as ascending ranges (first, last)."""
    found: list[tuple[int, int]] = []
    for version in sorted(versions):
        if found and version == found[-1][1] + 1:
            found[-1] = (found[-1][0], version)
        else:
            found.append((version, version))
    return tuple(found)


def read_retention(store: ObjectStore, run: str) -> Retention | None:
    """What retention says; None if it never ran, or its record cannot be used. A hint."""
    key = keys.retention(run)
    return read_hint(
        store, key, Retention.parse, run=run, max_bytes=MAX_RETENTION_BYTES, level=logging.WARNING
    )
