"""From patch files and the weights they start from to an update set, trusting nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stitch.codec.buckets import Bucket, check_bucket, check_disjoint
from stitch.codec.changes import bounds_by_slice
from stitch.codec.compose import compact
from stitch.codec.digest import DigestState, update_gain
from stitch.codec.encodings import (
    JOINING,
    DecodedChanges,
    Encoding,
    Joining,
    OldWords,
    Payload,
    encoding_named,
)
from stitch.codec.patch import (
    Entry,
    PatchHeader,
    most_header_bytes,
    payload_checksum,
    read_header,
)
from stitch.codec.pool import default_threads, ordered
from stitch.codec.update import JointUpdate, Tensors, TensorUpdate, UpdateSet
from stitch.codec.words import Positions
from stitch.errors import BaseMismatchError, CorruptPatchError, SchemaMismatchError
from stitch.tensors.host import HostWeights
from stitch.tensors.reader import WeightReader
from stitch.types import Schema

Gains = npt.NDArray[np.uint64]

_LITTLE_WORK = 1 << 16
"""Words to look at below which threads would take longer to start than to do it."""
_MOST_TOGETHER = 1 << 20
"""Changes that are decoded by one call, unless one bucket has more."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    entry: Entry
    encoding: Encoding
    payload: memoryview
    what: str


@dataclass(frozen=True)
class _Batch:
    """What a thread does at a time: one job, or several that `together` takes."""

    jobs: list[_Job]
    together: Joining | None = None


def decode_parts(
    parts: Sequence[bytes | memoryview],
    weights: WeightReader,
    before: DigestState,
    *,
    digest_after: str | None = None,
    threads: int | None = None,
) -> tuple[UpdateSet, DigestState]:
    """Decode all parts of one patch against the weights it starts from; writes nothing.

    `parts` may come in any order. `before` is the digest state of `weights`; `digest_after` is the
    version digest that the result must have, on top of the one that the last part states.

    Returns the update set and the digest state after it. Raises BaseMismatchError if the patch
    starts from other weights, UnsupportedFormatError for a format version or encoding of a later
    release, and CorruptPatchError for anything else that is wrong.
    """
    if before.schema.digest != weights.schema.digest:
        raise SchemaMismatchError("the digest state is of another schema than the weights")
    schema = weights.schema
    ordered_parts = _check_parts(parts, schema, before.version_digest())
    jobs = [job for view, header in ordered_parts for job in _jobs(view, header)]
    for job in jobs:
        check_bucket(job.entry.bucket, schema)
    check_disjoint((job.entry.bucket for job in jobs), schema)
    updates: list[TensorUpdate] = []
    joint: list[JointUpdate] = []
    gains = np.zeros_like(before.lanes)

    if sum(map(_work, jobs)) < _LITTLE_WORK:
        threads = 1
    batches = _batches(jobs, weights, default_threads() if threads is None else threads)
    for found, tensors, lanes in ordered(lambda batch: _decode(batch, weights), batches, threads):
        if isinstance(found, JointUpdate):
            joint.append(found)
        else:
            updates += found
        np.add.at(gains, tensors, lanes)
    after = before.plus(gains)
    _check_after(after, ordered_parts[-1][1].digest_after, digest_after)
    if not joint:
        updates.sort(key=lambda update: (update.tensor, update.first))
    return UpdateSet(updates, joint), after


def _check_parts(
    parts: Sequence[bytes | memoryview], schema: Schema, digest: str
) -> list[tuple[memoryview, PatchHeader]]:
    """Views and headers by part number: one whole patch, for these weights."""
    most = most_header_bytes(schema)
    pairs = [(memoryview(data).cast("B"), read_header(data, most)) for data in parts]
    pairs.sort(key=lambda pair: pair[1].part)
    headers = [header for _, header in pairs]
    numbers = [header.part for header in headers]
    if numbers != list(range(len(numbers))) or not numbers:
        raise CorruptPatchError(f"a patch needs each of its parts once, from 0; got {numbers}")
    if [header.last for header in headers] != [False] * (len(headers) - 1) + [True]:
        raise CorruptPatchError(f"the last of {len(headers)} parts is missing or not the last")
    for header in headers:
        if header.schema_digest != schema.digest:
            raise BaseMismatchError(
                f"patch part {header.part} is for weights of schema {header.schema_digest}, these "
                f"have schema {schema.digest}; it belongs to another model or view"
            )
        if header.digest_before != digest:
            raise BaseMismatchError(
                f"patch part {header.part} starts from weights with digest "
                f"{header.digest_before}, these have {digest}; apply the patches between them "
                "first, or start again from the base or an anchor"
            )
    if sum(header.num_elements for header in headers) != schema.num_elements:
        raise CorruptPatchError(
            f"the parts together compared {sum(h.num_elements for h in headers)} elements, the "
            f"schema has {schema.num_elements}"
        )
    return pairs


def _jobs(view: memoryview, header: PatchHeader) -> Iterator[_Job]:
    for number, entry in enumerate(header.buckets):
        what = f"patch part {header.part}, bucket {number} ({entry.bucket})"
        encoding = encoding_named(entry.encoding, what)
        payload = view[entry.offset : entry.offset + entry.num_bytes]
        yield _Job(entry=entry, encoding=encoding, payload=payload, what=what)


def _batches(jobs: Sequence[_Job], weights: WeightReader, threads: int) -> list[_Batch]:
    """All jobs, the most work first."""
    if not isinstance(weights, HostWeights):
        return [_Batch([job]) for job in jobs]
    alone, joining = [], defaultdict(list)
    for job in jobs:
        encoding, bucket = JOINING.get(job.entry.encoding), job.entry.bucket
        if encoding is not None and encoding.joins(job.payload, bucket):
            joining[encoding, bucket.dtype].append(job)
        else:
            alone.append(_Batch([job]))
    most = sum(map(_work, itertools.chain.from_iterable(joining.values())))
    if threads > 1:
        most = max(_LITTLE_WORK, most // (2 * threads))
    batches = alone
    for (encoding, _), group in joining.items():
        left = 0
        for job in group:
            if _work(job) > left:
                batches.append(_Batch([], encoding))
                left = min(most, _MOST_TOGETHER)
            batches[-1].jobs.append(job)
            left -= _work(job)
    return sorted(batches, key=lambda batch: sum(map(_work, batch.jobs)), reverse=True)


def _work(job: _Job) -> int:
    """Words that decoding the job looks at."""
    return (
        job.entry.num_changed if job.encoding.reads == "changed" else job.entry.bucket.num_elements
    )


def _decode(
    batch: _Batch, weights: WeightReader
) -> tuple[list[TensorUpdate] | JointUpdate, Sequence[int] | Tensors, Gains]:
    """The changes of some buckets; tensors (n,), and what their lanes gain (n, 2)."""
    for job in batch.jobs:
        checksum = payload_checksum(job.payload)
        if checksum != job.entry.checksum:
            raise CorruptPatchError(
                f"{job.what}: payload has checksum {checksum}, the table says {job.entry.checksum}"
            )
    if batch.together is not None and isinstance(weights, HostWeights):
        payloads = [
            Payload(job.payload, job.entry.bucket, job.entry.num_changed, job.what)
            for job in batch.jobs
        ]
        joint, gains = batch.together.decode_together(payloads, weights)
        return joint, joint.tensors, gains
    (job,) = batch.jobs
    bucket = job.entry.bucket
    old = OldWords(bucket=bucket, weights=weights)
    decoded = job.encoding.decode(
        job.payload, num_changed=job.entry.num_changed, old=old, what=job.what
    )
    decoded = old.with_gains(decoded)
    if decoded.positions is None:
        updates = list(_whole_slices(bucket, decoded))
    else:
        ends = decoded.ends
        if ends is None:
            ends = _move_into_tensors(bucket, decoded.positions)
        joint = JointUpdate(
            tensors=bucket.table[:, 0],
            ends=ends,
            positions=decoded.positions,
            new=decoded.new,
            old=decoded.old,
        )
        if decoded.gains is not None:
            return joint, joint.tensors, decoded.gains
        updates = list(joint.updates())
    gains = np.array([update_gain(update, weights) for update in updates])
    return updates, [update.tensor for update in updates], gains


def _whole_slices(bucket: Bucket, decoded: DecodedChanges) -> Iterator[TensorUpdate]:
    """Slice by slice; slices without changes are left out."""
    offset = 0
    for piece in bucket.slices:
        end = offset + piece.num_elements
        whole = TensorUpdate(
            tensor=piece.tensor,
            positions=None,
            start=piece.start,
            new=decoded.new[offset:end],
            old=decoded.old[offset:end],
        )
        kept = compact(whole)
        if kept is not None:
            yield kept
        offset = end


def _move_into_tensors(bucket: Bucket, positions: Positions) -> npt.NDArray[np.int64]:
    """Where the positions of each slice end. Makes them count from their tensors' starts."""
    bounds = bounds_by_slice(bucket, positions)
    for piece, (lo, hi, offset) in zip(bucket.slices, bounds, strict=True):
        if offset != piece.start:
            positions[lo:hi] += piece.start - offset
    return np.array([hi for _, hi, _ in bounds], np.int64)


def _check_after(after: DigestState, stated: str | None, wanted: str | None) -> None:
    found = after.version_digest()
    for source, digest in (("its last part", stated), ("its manifest", wanted)):
        if digest is not None and digest != found:
            raise CorruptPatchError(
                f"the patch leads to weights with digest {found}, {source} says {digest}"
            )
