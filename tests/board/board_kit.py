"""Builders of small runs, manifests and heartbeats. Digests are made up but chain properly."""

from __future__ import annotations

import hashlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stitch.board import Board, Patience, Run, keys
from stitch.records import BlobRef, Heartbeat, Manifest, MergedPatch, RunRecord
from stitch.types import PatchStats, ReplicaState, Schema, TensorSpec

NO_WAITS = Patience(sleep=lambda _: None)

SCHEMA = Schema.of(
    [TensorSpec.of("a.weight", "BF16", (4, 8)), TensorSpec.of("b.weight", "F32", (16,))]
)


def digest(version: int, lineage: str = "") -> str:
    return hashlib.sha256(f"{lineage}{version}".encode()).hexdigest()[:32]


def run_record(name: str = "math", **changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "run": name,
        "base": "/models/base",
        "view": "bf16",
        "base_digest": digest(0),
        "schema_digest": SCHEMA.digest,
        "num_bytes": SCHEMA.num_bytes,
        "created_unix_s": 1_700_000_000.5,
        "writer": "trainer-0",
    }
    return RunRecord(**(fields | changes))


def new_run(board: Board, name: str = "math", **changes: Any) -> Run:
    return board.create_run(run_record(name, **changes), SCHEMA)


def manifest(run: Run, version: int, blobs: tuple[BlobRef, ...], **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "run": run.name,
        "version": version,
        "base_version": version - 1,
        "digest_before": digest(version - 1),
        "digest_after": digest(version),
        "schema_digest": run.record.schema_digest,
        "blobs": blobs,
        "stats": PatchStats(num_elements=48, num_changed=2, num_bytes=9, encodings={"gaps": 1}),
        "step": version * 10,
        "created_unix_s": 1_700_000_000.0 + version,
        "writer": "trainer-0",
        "attempt": secrets.token_hex(8),
        "epoch": 1,
    }
    return Manifest(**(fields | changes))


def publish(run: Run, version: int, data: bytes | None = None, **changes: Any) -> Manifest:
    """Put one blob and commit the version."""
    name = f"w{secrets.token_hex(4)}-0.patch"
    ref = run.put_blob(version, name, f"patch {version}".encode() if data is None else data)
    record = manifest(run, version, (ref,), **changes)
    run.commit(record)
    return record


def publish_through(run: Run, newest: int) -> None:
    for version in range(run.newest() + 1, newest + 1):
        publish(run, version)


def merged_patch(
    run: Run, start: int, version: int, blobs: tuple[BlobRef, ...], **changes: Any
) -> MergedPatch:
    fields: dict[str, Any] = {
        "run": run.name,
        "version": version,
        "base_version": start,
        "digest_before": digest(start),
        "digest_after": digest(version),
        "schema_digest": run.record.schema_digest,
        "blobs": blobs,
        "stats": PatchStats(num_elements=48, num_changed=2, num_bytes=9, encodings={"gaps": 1}),
        "created_unix_s": 1_700_000_000.0 + version,
        "writer": "compactor-0",
    }
    return MergedPatch(**(fields | changes))


def put_merged(run: Run, start: int, version: int, num_bytes: int = 5) -> MergedPatch:
    """Put one blob and the record of a merged patch."""
    name = keys.merged_blob_name(start, secrets.token_hex(4), 0)
    ref = run.put_blob(version, name, b"x" * num_bytes)
    return run.commit_merged(merged_patch(run, start, version, (ref,)))


def heartbeat(replica: str = "r1", **changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "replica": replica,
        "run": "math",
        "url": "http://127.0.0.1:9000",
        "region": "local",
        "state": ReplicaState.SERVING,
        "applied": 3,
        "newest_seen": 4,
        "ready": True,
        "reason": "",
        "last_error": "",
        "boot": "b00t",
        "seq": 1,
        "sent_unix_s": 1_700_000_000.0,
        "versions": ({"version": 3, "fetch_s": 0.5, "pause_ms": 12.5},),
    }
    return Heartbeat(**(fields | changes))


def fill(board: Board, newest: int, name: str = "math") -> None:
    """Run `name` with `newest` versions, written fast: each manifest names the same blob."""
    run = new_run(board, name)
    ref = run.put_blob(1, "w0-0.patch", b"patch")

    def put(version: int) -> None:
        data = manifest(run, version, (ref,)).to_json_bytes()
        board.store.put(keys.manifest(name, version), data, mode="overwrite")

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(put, range(1, newest + 1)):
            pass
    run.write_head(newest)
