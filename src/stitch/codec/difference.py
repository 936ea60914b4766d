"""The update set between two readers of one schema, without a patch in between."""

from __future__ import annotations

from collections.abc import Iterator

from stitch.codec.buckets import Bucket, plan_buckets
from stitch.codec.changes import BucketChanges, bounds_by_slice, find_changes
from stitch.codec.encode import check_same_schema
from stitch.codec.pool import ordered
from stitch.codec.update import TensorUpdate, UpdateSet
from stitch.tensors.reader import Progress, WeightReader


def diff_update(
    old: WeightReader,
    new: WeightReader,
    progress: Progress | None = None,
    threads: int | None = None,
) -> UpdateSet:
    """The update set from `old` to `new`, without a patch in between."""
    check_same_schema(old.schema, new.schema)
    schema = old.schema
    updates: list[TensorUpdate] = []
    done = 0

    def work(bucket: Bucket) -> tuple[Bucket, list[TensorUpdate]]:
        return bucket, list(_updates_of(find_changes(bucket, old, new)))

    for bucket, found in ordered(work, plan_buckets(schema), threads):
        updates += found
        done += bucket.num_bytes
        if progress:
            progress(done, schema.num_bytes)
    return UpdateSet(sorted(updates, key=lambda update: (update.tensor, update.first)))


def _updates_of(changes: BucketChanges) -> Iterator[TensorUpdate]:
    bucket = changes.bucket
    rows = bounds_by_slice(bucket, changes.positions)
    for at, (piece, (lo, hi, offset)) in enumerate(zip(bucket.slices, rows, strict=True)):
        if hi == lo:
            continue
        if (hi - lo) * (8 + 2 * bucket.word_bytes) > piece.num_elements * 2 * bucket.word_bytes:
            whole = TensorUpdate(
                tensor=piece.tensor,
                positions=None,
                start=piece.start,
                new=changes.new_slices[at].copy(),
                old=changes.old_slices[at].copy(),
            )
            yield whole
            continue
        yield TensorUpdate(
            tensor=piece.tensor,
            positions=changes.positions[lo:hi] - (offset - piece.start),
            new=changes.new[lo:hi].copy(),
            old=changes.old[lo:hi].copy(),
        )
