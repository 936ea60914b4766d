"""Getting a step's bytes from the board."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stitch.board import Run, Staging
from stitch.board.transfers.staging import staging_folder
from stitch.errors import CorruptBlobError, StoreError
from stitch.failpoints import reach
from stitch.records import AnchorRecord, Manifest, MergedPatch
from stitch.tensors import WeightReader, open_checkpoint
from stitch.tensors.reader import Progress

STAGED_BYTES = 32 * 2**20
"""Patches from here on go through the disk, so that a fetch that ends early can be gone on with."""


def fetch_parts(
    run: Run, patch: Manifest | MergedPatch, scratch: Path | None = None
) -> list[bytes]:
    """All files of one patch, checked against the sizes and BLAKE3 that its record states.

    Those of a large patch are staged below `scratch`, if it is given, until all of them are there.
    """
    if scratch is not None and sum(blob.num_bytes for blob in patch.blobs) >= STAGED_BYTES:
        parts = _staged_parts(run, patch, scratch)
    else:
        parts = [run.read_blob(patch.version, blob) for blob in patch.blobs]
    reach("replica.fetched")
    return parts


def _staged_parts(run: Run, patch: Manifest | MergedPatch, scratch: Path) -> list[bytes]:
    with Staging(staging_folder(scratch)) as staging:
        for blob in patch.blobs:
            for _ in run.stage_blob(staging, patch.version, blob):
                pass
        parts = []
        for blob in patch.blobs:
            parts.append(staging.read(blob))
            staging.drop(blob)
    return parts


@contextmanager
def fetched_anchor(
    run: Run, anchor: AnchorRecord, scratch: Path | None, progress: Progress | None
) -> Iterator[WeightReader]:
    """An anchor's weights, from a copy below `scratch` that is deleted afterwards.

    A fetch that ends early, even by a kill, is gone on with by the next one with this `scratch`.

    Its files are checked against the record's sizes and BLAKE3, its tensors against the schema;
    the digest is left to the caller, who reads every word anyway. A scratch directory that is full
    or not to be written raises StoreError.
    """
    try:
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="stitch-anchor-", dir=scratch) as directory:
            path = run.fetch_anchor(
                anchor,
                Path(directory) / "checkpoint",
                progress,
                staging=staging_folder(scratch),
            )
            with open_checkpoint(path) as checkpoint:
                if checkpoint.schema.digest != anchor.schema_digest:
                    raise CorruptBlobError(
                        f"anchor {anchor.version} of run {run.name!r} holds tensors of schema "
                        f"{checkpoint.schema.digest}, its record says {anchor.schema_digest}"
                    )
                yield checkpoint
    except OSError as error:
        where = scratch or tempfile.gettempdir()
        raise StoreError(
            f"anchor {anchor.version} of run {run.name!r} cannot be kept "
            f"in the scratch directory {where}: {error}"
        ) from error
