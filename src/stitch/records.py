"""The JSON records of a board: written canonically, parsed strictly. Standard library only.

A record is one JSON object. Writing sorts the keys and leaves out blanks, so equal records have
equal bytes. Parsing checks presence, type and range of every field that this release knows and
ignores fields it does not know; a repeated field, NaN or a wrong type raises CorruptRecordError
with the record's key and the field. A higher `format` raises UnsupportedFormatError.
See docs/protocol.md, "Records".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stitch.errors import CorruptRecordError, UnsupportedFormatError, UsageError
from stitch.types import (
    BLOB_NAME,
    MAX_VERSION,
    PatchStats,
    ReplicaState,
    VersionRef,
    check_run_name,
    is_http_address,
)

FORMAT = 1
"""The only record format so far."""

MAX_HEARTBEAT_VERSIONS = 32
MAX_INTEGER = 2**63 - 1
MAX_TEXT = 10_000
"""Longest text field, in characters."""

T = TypeVar("T")


def canonical_json(value: object) -> bytes:
    """Compact ASCII JSON with sorted keys; NaN and infinities raise ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


@dataclass(frozen=True, kw_only=True)
class BlobRef:
    """Name, size and BLAKE3 (64 hex digits) of one stored object. The name is one path segment."""

    name: str
    num_bytes: int
    blake3: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not BLOB_NAME.fullmatch(self.name):
            raise UsageError(
                f"blob name {self.name!r:.200} is not allowed: use 1 to 200 letters, digits, "
                "'.', '_' or '-', starting with a letter or digit"
            )

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "num_bytes": self.num_bytes, "blake3": self.blake3}

    @classmethod
    def from_fields(cls, fields: Fields) -> BlobRef:
        return cls(
            name=fields.text("name", pattern=BLOB_NAME),
            num_bytes=fields.integer("num_bytes"),
            blake3=fields.hexadecimal("blake3", digits=64),
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """`run.json`: where a run starts. `num_bytes` is the size of the whole view."""

    run: str
    base: str
    view: str
    base_digest: str
    schema_digest: str
    num_bytes: int
    created_unix_s: float
    writer: str
    parent: VersionRef | None = None
    assets: tuple[BlobRef, ...] = ()
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(
            vars(self)
            | {
                "parent": self.parent and {"run": self.parent.run, "version": self.parent.version},
                "assets": [ref.to_json() for ref in self.assets],
            }
        )

    @classmethod
    def parse(cls, data: bytes, key: str) -> RunRecord:
        fields = Fields.of_record(data, key, FORMAT)
        parent = fields.optional("parent", fields.child)
        return cls(
            run=fields.run_name("run"),
            base=fields.text("base"),
            view=fields.text("view"),
            base_digest=fields.hexadecimal("base_digest"),
            schema_digest=fields.hexadecimal("schema_digest"),
            num_bytes=fields.integer("num_bytes"),
            created_unix_s=fields.number("created_unix_s"),
            writer=fields.text("writer"),
            parent=None if parent is None else _ref(parent),
            assets=_blobs(fields, "assets"),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`manifest.json`: its creation publishes `version`. Digests are version digests.

    `attempt` is unique to one try to publish, so that a writer recognises its own manifest.
    """

    run: str
    version: int
    base_version: int
    digest_before: str
    digest_after: str
    schema_digest: str
    blobs: tuple[BlobRef, ...]
    stats: PatchStats
    step: int | None
    created_unix_s: float
    writer: str
    attempt: str
    epoch: int
    kind: str = "patch"
    format: int = FORMAT

    @property
    def ref(self) -> VersionRef:
        return VersionRef(self.run, self.version)

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch, over all blobs."""
        return sum(ref.num_bytes for ref in self.blobs)

    def to_json_bytes(self) -> bytes:
        return canonical_json(
            vars(self)
            | {
                "blobs": [ref.to_json() for ref in self.blobs],
                "stats": vars(self.stats) | {"encodings": dict(self.stats.encodings)},
            }
        )

    @classmethod
    def parse(cls, data: bytes, key: str) -> Manifest:
        fields = Fields.of_record(data, key, FORMAT)
        kind = fields.choice("kind", ("patch",))
        version = fields.version("version", low=1)
        return cls(
            run=fields.run_name("run"),
            version=version,
            base_version=fields.integer("base_version", low=version - 1, high=version - 1),
            digest_before=fields.hexadecimal("digest_before"),
            digest_after=fields.hexadecimal("digest_after"),
            schema_digest=fields.hexadecimal("schema_digest"),
            blobs=_blobs(fields, "blobs", at_least=1),
            stats=_stats(fields.child("stats")),
            step=fields.optional("step", lambda name: fields.integer(name, low=-(2**63))),
            created_unix_s=fields.number("created_unix_s"),
            writer=fields.text("writer"),
            attempt=fields.text("attempt"),
            epoch=fields.integer("epoch"),
            kind=kind,
        )


@dataclass(frozen=True, kw_only=True)
class AnchorRecord:
    """`anchor.json`: a version stored whole, as safetensors files (and their index, first).

    A file's name is `anchor-<attempt>-<name in the checkpoint directory>`.
    """

    run: str
    version: int
    digest: str
    schema_digest: str
    files: tuple[BlobRef, ...]
    num_bytes: int
    created_unix_s: float
    writer: str
    format: int = FORMAT

    @property
    def ref(self) -> VersionRef:
        return VersionRef(self.run, self.version)

    def to_json_bytes(self) -> bytes:
        return canonical_json(vars(self) | {"files": [ref.to_json() for ref in self.files]})

    @classmethod
    def parse(cls, data: bytes, key: str) -> AnchorRecord:
        fields = Fields.of_record(data, key, FORMAT)
        files = _blobs(fields, "files", at_least=1)
        num_bytes = sum(ref.num_bytes for ref in files)
        return cls(
            run=fields.run_name("run"),
            version=fields.version("version"),
            digest=fields.hexadecimal("digest"),
            schema_digest=fields.hexadecimal("schema_digest"),
            files=files,
            num_bytes=fields.integer("num_bytes", low=num_bytes, high=num_bytes),
            created_unix_s=fields.number("created_unix_s"),
            writer=fields.text("writer"),
        )


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """`epochs/<n>.json`: from this epoch on, `writer` publishes and `run` is the current run."""

    epoch: int
    run: str
    writer: str
    created_unix_s: float
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(vars(self))

    @classmethod
    def parse(cls, data: bytes, key: str) -> EpochRecord:
        fields = Fields.of_record(data, key, FORMAT)
        return cls(
            epoch=fields.version("epoch", low=1),
            run=fields.run_name("run"),
            writer=fields.text("writer"),
            created_unix_s=fields.number("created_unix_s"),
        )


@dataclass(frozen=True, kw_only=True)
class Head:
    """`head.json`: a hint at the newest version. It may be stale or missing."""

    run: str
    version: int
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(vars(self))

    @classmethod
    def parse(cls, data: bytes, key: str) -> Head:
        fields = Fields.of_record(data, key, FORMAT)
        return cls(run=fields.run_name("run"), version=fields.version("version"))


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """`replicas/<id>.json`: what a replica last said about itself.

    `boot` is random per process and `seq` grows with every beat, so liveness is judged by change
    and not by anyone's clock. `versions` describes the last commits, newest last: version,
    from_version, num_changed, fetch_s, stage_s, pause_ms, published_unix_s, served_unix_s,
    bytes_fetched.
    """

    replica: str
    run: str | None
    url: str
    region: str
    state: ReplicaState
    applied: int | None
    newest_seen: int | None
    ready: bool
    reason: str
    last_error: str
    boot: str
    seq: int
    sent_unix_s: float
    versions: tuple[Mapping[str, Any], ...] = field(default=())
    format: int = FORMAT

    def to_json_bytes(self) -> bytes:
        return canonical_json(
            vars(self) | {"state": self.state.value, "versions": [dict(v) for v in self.versions]}
        )

    @classmethod
    def parse(cls, data: bytes, key: str) -> Heartbeat:
        fields = Fields.of_record(data, key, FORMAT)
        return cls(
            replica=fields.text("replica", pattern=BLOB_NAME),
            run=fields.optional("run", fields.run_name),
            url=fields.http_address("url"),
            region=fields.text("region"),
            state=ReplicaState(fields.choice("state", tuple(ReplicaState))),
            applied=fields.optional("applied", fields.version),
            newest_seen=fields.optional("newest_seen", fields.version),
            ready=fields.boolean("ready"),
            reason=fields.text("reason"),
            last_error=fields.text("last_error"),
            boot=fields.text("boot"),
            seq=fields.integer("seq"),
            sent_unix_s=fields.number("sent_unix_s"),
            versions=tuple(
                entry.numbers() for entry in fields.children("versions", MAX_HEARTBEAT_VERSIONS)
            ),
        )


def _ref(fields: Fields) -> VersionRef:
    return VersionRef(fields.run_name("run"), fields.version("version"))


def _stats(fields: Fields) -> PatchStats:
    num_elements = fields.integer("num_elements")
    return PatchStats(
        num_elements=num_elements,
        num_changed=fields.integer("num_changed", high=num_elements),
        num_bytes=fields.integer("num_bytes"),
        encodings=fields.child("encodings").integers(),
    )


def _blobs(fields: Fields, name: str, *, at_least: int = 0) -> tuple[BlobRef, ...]:
    """Blob references whose names differ even where a file system ignores case."""
    refs = tuple(BlobRef.from_fields(child) for child in fields.children(name))
    if len(refs) < at_least:
        raise fields.error(name, f"lists {len(refs)} blobs, wanted at least {at_least}")
    if len({ref.name.lower() for ref in refs}) != len(refs):
        raise fields.error(name, "names one blob twice")
    return refs


# --- strict reading ----------------------------------------------------------------------


def load_json(data: bytes, key: str) -> object:
    """The JSON value in `data`. CorruptRecordError for anything that is not strict UTF-8 JSON."""
    if not data.strip(b"\0"):
        raise CorruptRecordError(f"{key}: {len(data)} bytes, empty or all zero, wanted JSON")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptRecordError(f"{key}: not valid JSON ({str(error)[:200]})") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a field occurs twice")
    return names


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object; `path` leads to it inside the record at `key`."""

    values: dict[str, Any]
    key: str
    path: str = ""

    @classmethod
    def of_record(cls, data: bytes, key: str, known_format: int) -> Fields:
        """The fields of the record `data`. UnsupportedFormatError if a newer release wrote it."""
        values = load_json(data, key)
        if not isinstance(values, dict):
            raise CorruptRecordError(f"{key}: holds a {type(values).__name__}, wanted an object")
        fields = cls(values, key)
        found = fields.integer("format", low=1)
        if found > known_format:
            raise UnsupportedFormatError(
                f"{key}: format {found}, but this release knows formats up to {known_format}"
            )
        return fields

    def error(self, name: str, problem: str) -> CorruptRecordError:
        return CorruptRecordError(f"{self.key}: field {self.path}{name} {problem}")

    def _get(self, name: str, kind: type[T], wanted: str) -> T:
        if name not in self.values:
            raise self.error(name, "is missing")
        value = self.values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"is {value!r:.100}, wanted {wanted}")
        return value

    def text(self, name: str, *, pattern: re.Pattern[str] | None = None) -> str:
        value = self._get(name, str, "a text")
        if len(value) > MAX_TEXT or (pattern is not None and not pattern.fullmatch(value)):
            raise self.error(name, f"is {value!r:.100}, which is not allowed")
        return value

    def hexadecimal(self, name: str, *, digits: int = 32) -> str:
        value = self._get(name, str, f"{digits} hexadecimal digits")
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise self.error(name, f"is {value!r:.100}, wanted {digits} hexadecimal digits")
        return value

    def http_address(self, name: str) -> str:
        value = self.text(name)
        if not is_http_address(value):
            raise self.error(name, f"is {value!r:.100}, wanted a plain http(s) address")
        return value

    def run_name(self, name: str) -> str:
        value = self.text(name)
        try:
            return check_run_name(value)
        except UsageError as error:
            raise self.error(name, f"is wrong: {error}") from None

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self._get(name, int, "an integer")
        if not low <= value <= high:
            raise self.error(name, f"is {value}, wanted {low} to {high}")
        return value

    def version(self, name: str, *, low: int = 0) -> int:
        return self.integer(name, low=low, high=MAX_VERSION)

    def number(self, name: str) -> float:
        if isinstance(self.values.get(name), int):
            return float(self.integer(name, low=-MAX_INTEGER))
        value = self._get(name, float, "a number")
        if not math.isfinite(value):
            raise self.error(name, "is not finite")
        return value

    def boolean(self, name: str) -> bool:
        return self._get(name, bool, "true or false")

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value not in allowed:
            raise self.error(name, f"is {value!r:.100}, wanted one of {', '.join(allowed)}")
        return value

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """`read(name)`, or None where the field is present and null."""
        if name in self.values and self.values[name] is None:
            return None
        return read(name)

    def child(self, name: str) -> Fields:
        return Fields(self._get(name, dict, "an object"), self.key, f"{self.path}{name}.")

    def children(self, name: str, at_most: int = 100_000) -> list[Fields]:
        """The objects in a list field."""
        values = self._get(name, list, "a list")
        if len(values) > at_most:
            raise self.error(name, f"has {len(values)} entries, wanted at most {at_most}")
        found = []
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{name}[{index}]", f"is {value!r:.100}, wanted an object")
            found.append(Fields(value, self.key, f"{self.path}{name}[{index}]."))
        return found

    def integers(self) -> dict[str, int]:
        """All fields, each of which must be a non-negative integer."""
        return {name: self.integer(name) for name in self.values}

    def numbers(self) -> dict[str, int | float | None]:
        """All fields, each of which must be a number or null."""
        for name, value in self.values.items():
            if value is not None:
                self.number(name)
        return dict(self.values)
