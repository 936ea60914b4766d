"""From patch files and the weights they start from to an update set, trusting nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stitch.codec.buckets import Bucket, check_bucket, check_disjoint
from stitch.codec.changes import bounds_by_slice
from stitch.codec.compose import compact
from stitch.codec.digest import DigestState, update_gain
from stitch.codec.encodings import (
    ENCODINGS,
    DecodedChanges,
    Encoding,
    OldWords,
    encoding_named,
)
from stitch.codec.encodings.gaps import Gaps
from stitch.codec.encodings.port import Payload
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
    part: int
    number: int

    @property
    def what(self) -> str:
        return _named(self.part, self.number, self.entry)

    def for_encoding(self) -> Payload:
        return Payload(self.payload, self.entry.bucket, self.entry.num_changed, self.what)


def _named(part: int, number: int, entry: Entry) -> str:
    return f"patch part {part}, bucket {number} ({entry.bucket})"


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
        encoding = ENCODINGS.get(entry.encoding)
        if encoding is None:
            encoding = encoding_named(entry.encoding, _named(header.part, number, entry))
        payload = view[entry.offset : entry.offset + entry.num_bytes]
        yield _Job(entry=entry, encoding=encoding, payload=payload, part=header.part, number=number)


def _batches(jobs: Sequence[_Job], weights: WeightReader, threads: int) -> list[list[_Job]]:
    """What a thread does at a time, the most work first: jobs that can be done together, or one."""
    if not isinstance(weights, HostWeights):
        return [[job] for job in jobs]
    joining = [job for job in jobs if _joins(job)]
    most = sum(job.entry.num_changed for job in joining)
    if threads > 1:
        most = max(_LITTLE_WORK, most // (2 * threads))
    most = min(most, _MOST_TOGETHER)
    batches = [[job] for job in jobs if not _joins(job)]
    left, dtype = 0, ""
    for job in joining:
        num_changed = job.entry.num_changed
        if num_changed > left or job.entry.bucket.dtype != dtype:
            batches.append([])
            left, dtype = most, job.entry.bucket.dtype
        batches[-1].append(job)
        left -= num_changed
    return sorted(batches, key=lambda batch: sum(map(_work, batch)), reverse=True)


def _joins(job: _Job) -> bool:
    return isinstance(job.encoding, Gaps) and job.encoding.joins(job.payload, job.entry.bucket)


def _work(job: _Job) -> int:
    """Words that decoding the job looks at."""
    return (
        job.entry.num_changed if job.encoding.reads == "changed" else job.entry.bucket.num_elements
    )


def _decode(
    batch: Sequence[_Job], weights: WeightReader
) -> tuple[list[TensorUpdate] | JointUpdate, Sequence[int] | Tensors, Gains]:
    """The changes of some buckets; tensors (n,), and what their lanes gain (n, 2).

    There are several buckets only if they can be decoded together.
    """
    for job in batch:
        found = payload_checksum(job.payload)
        if found != job.entry.checksum:
            raise CorruptPatchError(
                f"{job.what}: payload has checksum {found}, the table says {job.entry.checksum}"
            )
    job = batch[0]
    if isinstance(job.encoding, Gaps) and isinstance(weights, HostWeights) and _joins(job):
        joint, gains = job.encoding.decode_together([job.for_encoding() for job in batch], weights)
        return joint, joint.tensors, gains
    entry = job.entry
    old = OldWords(bucket=entry.bucket, weights=weights)
    decoded = job.encoding.decode(
        job.payload, num_changed=entry.num_changed, old=old, what=job.what
    )
    decoded = old.with_gains(decoded)
    if decoded.positions is not None and decoded.gains is not None and decoded.ends is not None:
        tensors = entry.bucket.table[:, 0]
        joint = JointUpdate(
            tensors=tensors,
            ends=decoded.ends,
            positions=decoded.positions,
            new=decoded.new,
            old=decoded.old,
        )
        return joint, tensors, decoded.gains
    find = _whole_slices if decoded.positions is None else _listed
    updates = list(find(entry.bucket, decoded))
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


def _listed(bucket: Bucket, decoded: DecodedChanges) -> Iterator[TensorUpdate]:
    """Slice by slice; slices without changes are left out."""
    assert decoded.positions is not None
    ends = _move_into_tensors(bucket, decoded.positions)
    lo = 0
    for piece, hi in zip(bucket.slices, ends, strict=True):
        if hi > lo:
            yield TensorUpdate(
                tensor=piece.tensor,
                positions=decoded.positions[lo:hi],
                new=decoded.new[lo:hi],
                old=decoded.old[lo:hi],
            )
        lo = hi


def _move_into_tensors(bucket: Bucket, positions: Positions) -> list[int]:
    """Where the positions of each slice end. Makes them count from their tensors' starts."""
    ends = []
    for piece, (lo, hi, offset) in zip(
        bucket.slices, bounds_by_slice(bucket, positions), strict=True
    ):
        if offset != piece.start:
            positions[lo:hi] += piece.start - offset
        ends.append(hi)
    return ends


def _check_after(after: DigestState, stated: str | None, wanted: str | None) -> None:
    found = after.version_digest()
    for source, digest in (("its last part", stated), ("its manifest", wanted)):
        if digest is not None and digest != found:
            raise CorruptPatchError(
                f"the patch leads to weights with digest {found}, {source} says {digest}"
            )
