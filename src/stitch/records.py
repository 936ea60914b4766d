"""The JSON records of a board: written canonically, parsed strictly. Standard library only.

A record is one JSON object. Writing sorts the keys and leaves out blanks, so equal records have
equal bytes. Parsing checks presence, type and range of every field that this release knows and
ignores fields it does not know; a repeated field, NaN or a wrong type raises CorruptRecordError
with the record's key and the field. A higher `format` raises UnsupportedFormatError.
See docs/protocol.md, "Records".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stitch.errors import UsageError
from stitch.strict_json import Fields, canonical_json
from stitch.types import (
    BLOB_NAME,
    PatchStats,
    ReplicaState,
    VersionRef,
)

FORMAT = 1
"""The only record format so far."""

MAX_HEARTBEAT_VERSIONS = 32


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
class PatchRecord:
    """What leads from `base_version` to `version` of a run. Digests are version digests."""

    run: str
    version: int
    base_version: int
    digest_before: str
    digest_after: str
    schema_digest: str
    blobs: tuple[BlobRef, ...]
    stats: PatchStats
    created_unix_s: float
    writer: str
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


@dataclass(frozen=True, kw_only=True)
class Manifest(PatchRecord):
    """`manifest.json`: its creation publishes `version`, by a patch from the version before it.

    `attempt` is unique to one try to publish, so that a writer recognises its own manifest.
    """

    step: int | None
    attempt: str
    epoch: int
    kind: str = "patch"

    @classmethod
    def parse(cls, data: bytes, key: str) -> Manifest:
        fields = Fields.of_record(data, key, FORMAT)
        kind = fields.choice("kind", ("patch",))
        version = fields.version("version", low=1)
        return cls(
            **_patch_values(fields),
            version=version,
            base_version=fields.integer("base_version", low=version - 1, high=version - 1),
            step=fields.optional("step", lambda name: fields.integer(name, low=-(2**63))),
            attempt=fields.text("attempt"),
            epoch=fields.integer("epoch"),
            kind=kind,
        )


@dataclass(frozen=True, kw_only=True)
class MergedPatch(PatchRecord):
    """`v/<version>/from-<base_version>.json`: a patch over several versions at once.

    One more way from `base_version` to `version`; nothing depends on it.
    """

    @classmethod
    def parse(cls, data: bytes, key: str) -> MergedPatch:
        fields = Fields.of_record(data, key, FORMAT)
        version = fields.version("version", low=2)
        return cls(
            **_patch_values(fields),
            version=version,
            base_version=fields.integer("base_version", high=version - 2),
        )


def _patch_values(fields: Fields) -> dict[str, Any]:
    """Values of a PatchRecord, but for its versions."""
    return {
        "run": fields.run_name("run"),
        "digest_before": fields.hexadecimal("digest_before"),
        "digest_after": fields.hexadecimal("digest_after"),
        "schema_digest": fields.hexadecimal("schema_digest"),
        "blobs": _blobs(fields, "blobs", at_least=1),
        "stats": _stats(fields.child("stats")),
        "created_unix_s": fields.number("created_unix_s"),
        "writer": fields.text("writer"),
    }


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
    """`epochs/<n>.json`: from this epoch on, `writer` publishes and `run` is the current run.

    `process` names the writer's process for those who share its machine; empty if it is unknown.
    """

    epoch: int
    run: str
    writer: str
    created_unix_s: float
    process: str = ""
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
            process=fields.text("process"),
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
