"""`anchors.json`: a hint at the versions that have an anchor. Nothing depends on it.

Whoever writes or deletes anchors lists the run and overwrites the hint; readers are spared the
listing, which grows with the number of versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from stitch.board import keys
from stitch.board.hints import read_hint
from stitch.board.stores.store import ObjectStore
from stitch.records import FORMAT
from stitch.strict_json import Fields, canonical_json
from stitch.types import MAX_VERSION

MAX_LIST_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class AnchorList:
    run: str
    versions: tuple[int, ...]
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(vars(self))

    @classmethod
    def parse(cls, data: bytes, key: str) -> AnchorList:
        fields = Fields.of_record(data, key, FORMAT)
        listed = fields.items("versions", int, lambda v: 0 <= v <= MAX_VERSION, "a version")
        return cls(run=fields.run_name("run"), versions=tuple(sorted(set(listed))))


def read_anchor_list(store: ObjectStore, run: str) -> list[int] | None:
    """Versions that the hint names, ascending; None if it is missing or cannot be used."""
    key = keys.anchor_list(run)
    found = read_hint(store, key, AnchorList.parse, run=run, max_bytes=MAX_LIST_BYTES)
    return None if found is None else list(found.versions)


def write_anchor_list(store: ObjectStore, run: str, versions: list[int]) -> None:
    """Overwrite the hint."""
    data = AnchorList(run=run, versions=tuple(versions)).to_json_bytes()
    store.put(keys.anchor_list(run), data, mode="overwrite")
