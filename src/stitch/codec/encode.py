"""From two readers of one schema to patch files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from stitch.codec.buckets import (
    DEFAULT_BUCKET_ELEMENTS,
    Bucket,
    cut_bucket,
    groups_of,
    plan_buckets,
)
from stitch.codec.changes import BucketChanges, find_changes, merged
from stitch.codec.choice import Decode, check_choice, choose
from stitch.codec.digest import DigestState
from stitch.codec.encodings import ENCODINGS
from stitch.codec.patch import FORMAT, Entry, PatchHeader, payload_checksum, write_part
from stitch.codec.pool import ordered
from stitch.codec.words import Lanes
from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors.reader import Progress, WeightReader
from stitch.types import PatchStats, Schema

DEFAULT_PART_BYTES = 64 << 20
MOST_LISTED = 1 << 18
"""Changes that are listed at a time: a bucket with more is cut, so that memory stays bounded.

Listing and coding takes some 50 bytes for each change.
"""
MOST_SHARING = 1 << 16
"""Changes of several buckets that are coded as those of one, so that few changes cost little."""
_GROUP = 4
"""Buckets that one thread takes at a time."""
MOST_WHOLE = 1 << 21
"""Elements of a bucket that an encoding takes at a time whose memory grows with the bucket."""


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    bucket: Bucket
    encoding: str
    num_changed: int
    payload: bytes
    checksum: str
    gains: list[tuple[int, Lanes]]
    """(tensor, what its digest lanes gain)."""


@dataclass(kw_only=True)
class _Part:
    """A part being filled."""

    number: int
    encoded: list[_Encoded] = field(default_factory=list)
    num_elements: int = 0
    num_absent: int = 0
    num_bytes: int = 0

    def add(self, result: _Encoded) -> None:
        self.num_elements += result.bucket.num_elements
        if result.num_changed:
            self.encoded.append(result)
            self.num_bytes += len(result.payload)
        else:
            self.num_absent += 1


class PatchEncoder:
    """Encodes the changes from `old` to `new` as one or more patch files.

    Each bucket of `new` is read once; `before` is the digest state of `old`, computed here if it
    is not given. `encoding` is that of all buckets, or "auto": for each the one that is likely the
    smallest. With `decode="changed"` decoding reads no old words but those that change.
    Peak extra memory: one part, and a few buckets.
    """

    def __init__(
        self,
        old: WeightReader,
        new: WeightReader,
        *,
        before: DigestState | None = None,
        encoding: str = "auto",
        decode: Decode = "any",
        threads: int | None = None,
        progress: Progress | None = None,
        max_part_bytes: int | None = DEFAULT_PART_BYTES,
        max_bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        embed_schema: bool = False,
    ) -> None:
        check_same_schema(old.schema, new.schema)
        check_choice(encoding, decode)
        if before is not None and before.schema.digest != old.schema.digest:
            raise SchemaMismatchError("the digest state is of another schema than the weights")
        self._old, self._new, self._schema = old, new, old.schema
        self._encoding, self._decode = encoding, decode
        self._threads, self._progress = threads, progress
        self._max_part_bytes, self._embed_schema = max_part_bytes, embed_schema
        self._groups = groups_of(plan_buckets(self._schema, max_bucket_elements), _GROUP)
        self._before = before
        self._after: DigestState | None = None
        self._stats: PatchStats | None = None

    @property
    def before(self) -> DigestState:
        """Digest state of `old`."""
        if self._before is None:
            self._before = DigestState.of(self._old, threads=self._threads)
        return self._before

    @property
    def after(self) -> DigestState:
        """Digest state of `new`; known once `parts` is exhausted."""
        if self._after is None:
            raise UsageError("PatchEncoder.after is known only after parts() is exhausted")
        return self._after

    @property
    def stats(self) -> PatchStats:
        """Over all parts; known once `parts` is exhausted."""
        if self._stats is None:
            raise UsageError("PatchEncoder.stats is known only after parts() is exhausted")
        return self._stats

    def parts(self) -> Iterator[bytes]:
        """Yield each patch file. Unchanged weights still give exactly one."""
        before = self.before
        gains = np.zeros_like(before.lanes)
        encodings: Counter[str] = Counter()
        done_bytes = num_changed = num_bytes = 0
        part = _Part(number=0)
        encoded = ordered(self._encode, self._groups, self._threads)
        for result in chain.from_iterable(encoded):
            if self._is_full(part, result):
                data = self._write(part, before, None)
                num_bytes += len(data)
                yield data
                del data
                part = _Part(number=part.number + 1)
            part.add(result)
            for tensor, gain in result.gains:
                gains[tensor] += gain
            encodings[result.encoding] += 1
            num_changed += result.num_changed
            done_bytes += result.bucket.num_bytes
            if self._progress:
                self._progress(done_bytes, self._schema.num_bytes)
        after = before.plus(gains)
        data = self._write(part, before, after)
        self._after = after
        self._stats = PatchStats(
            num_elements=self._schema.num_elements,
            num_changed=num_changed,
            num_bytes=num_bytes + len(data),
            encodings=dict(sorted(encodings.items())),
        )
        yield data

    def _is_full(self, part: _Part, result: _Encoded) -> bool:
        if self._max_part_bytes is None or not part.encoded:
            return False
        return part.num_bytes + len(result.payload) > self._max_part_bytes

    def _encode(self, group: Sequence[Bucket]) -> list[_Encoded]:
        """Some buckets; those with few changes share one, so that changes are what is paid for."""
        done: list[_Encoded] = []
        few: list[BucketChanges] = []
        for bucket in group:
            found = self._encode_unless_few(bucket)
            if not isinstance(found, BucketChanges):
                done += found
                continue
            if sum(held.num_changed for held in few) + found.num_changed > MOST_SHARING:
                done.append(_encoded(merged(few), "gaps"))
                few = []
            few.append(found)
        if few:
            done.append(_encoded(merged(few), "gaps"))
        return done

    def _encode_unless_few(self, bucket: Bucket) -> list[_Encoded] | BucketChanges:
        """The bucket's changes if they are few enough to share a payload; else it, encoded.

        It becomes several where so much changed that coding it at once takes too much memory. When
        this returns, the words of the bucket are held no more.
        """
        changes = find_changes(bucket, self._old, self._new)
        name = self._encoding
        if name == "auto" and changes.num_changed:
            name = choose(changes, self._decode)
        if name == "gaps" and 0 < changes.num_changed <= MOST_SHARING:
            changes.let_go()
            return changes
        most = _most_elements(changes, name)
        if not changes.num_changed or bucket.num_elements <= most:
            return [_encoded(changes, name)]
        del changes
        pieces = cut_bucket(bucket, most)
        return [_encoded(find_changes(piece, self._old, self._new), name) for piece in pieces]

    def _write(self, part: _Part, before: DigestState, after: DigestState | None) -> bytes:
        entries = [
            Entry(
                bucket=result.bucket,
                encoding=result.encoding,
                num_changed=result.num_changed,
                offset=0,
                num_bytes=len(result.payload),
                checksum=result.checksum,
            )
            for result in part.encoded
        ]
        header = PatchHeader(
            format=FORMAT,
            part=part.number,
            last=after is not None,
            schema_digest=self._schema.digest,
            digest_before=before.version_digest(),
            digest_after=None if after is None else after.version_digest(),
            num_elements=part.num_elements,
            num_absent=part.num_absent,
            buckets=tuple(entries),
            schema=self._schema if self._embed_schema else None,
        )
        return write_part(header, [result.payload for result in part.encoded])


def _most_elements(changes: BucketChanges, name: str) -> int:
    """How many elements of a bucket to encode at a time."""
    if not changes.num_changed or not ENCODINGS[name].lists_changes:
        return MOST_WHOLE
    return changes.bucket.num_elements * MOST_LISTED // changes.num_changed


def _encoded(changes: BucketChanges, name: str) -> _Encoded:
    bucket = changes.bucket
    if not changes.num_changed:
        return _Encoded(
            bucket=bucket, encoding="absent", num_changed=0, payload=b"", checksum="", gains=[]
        )
    payload = ENCODINGS[name].encode(changes)
    return _Encoded(
        bucket=bucket,
        encoding=name,
        num_changed=changes.num_changed,
        payload=payload,
        checksum=payload_checksum(payload),
        gains=[(p.tensor, g) for p, g in zip(bucket.slices, changes.gains, strict=True)],
    )


def check_same_schema(old: Schema, new: Schema) -> None:
    """Raise SchemaMismatchError naming the first differences."""
    if old.digest == new.digest:
        return
    ours, theirs = {str(s) for s in old.tensors}, {str(s) for s in new.tensors}
    raise SchemaMismatchError(
        "old and new weights have different tensors: "
        f"only in old {sorted(ours - theirs)[:5]}, only in new {sorted(theirs - ours)[:5]}"
    )


def encode_patch(
    old: WeightReader,
    new: WeightReader,
    *,
    before: DigestState | None = None,
    encoding: str = "auto",
    decode: Decode = "any",
    threads: int | None = None,
    progress: Progress | None = None,
    embed_schema: bool = True,
) -> tuple[bytes, PatchStats]:
    """One patch file with everything, for `stitch diff`."""
    encoder = PatchEncoder(
        old,
        new,
        before=before,
        encoding=encoding,
        decode=decode,
        threads=threads,
        progress=progress,
        max_part_bytes=None,
        embed_schema=embed_schema,
    )
    (data,) = encoder.parts()
    return data, encoder.stats
