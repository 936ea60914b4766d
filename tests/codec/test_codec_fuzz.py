"""Patches damaged behind right checksums: a named error or the exact weights, in bounded memory."""

from __future__ import annotations

import json
import resource
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from codec_cases import changed, schema_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_damage import (
    NAMED_ERRORS,
    Choose,
    check_decoding,
    check_payload,
    damaged_part,
    damaged_payload,
    joined,
    split,
    subject,
    text_of,
    with_text,
)
from pcodec import standalone

from stitch.codec import Bucket, DigestState, PatchEncoder, decode_parts, reference, warm
from stitch.codec.encodings import ENCODINGS
from stitch.codec.patch import PREAMBLE_BYTES, most_header_bytes
from stitch.codec.streams import BINS, PAIRS, PCODEC, RAW
from stitch.errors import BaseMismatchError, CorruptPatchError
from stitch.tensors import HostWeights

SUBJECT = subject()
SCHEMA = SUBJECT.old.schema
warm(SCHEMA)
for _part in SUBJECT.parts.values():
    check_decoding([_part], SUBJECT)  # what is loaded on first use does not count as memory taken
NAMES = st.sampled_from(sorted(ENCODINGS))


def test_the_subject_has_streams_of_every_form_of_gaps() -> None:
    forms = {payload[0] for payload in split(SUBJECT.parts["gaps"])[1]}
    assert forms == {RAW, PCODEC, BINS, PAIRS}


def choose_with(data: st.DataObject) -> Choose:
    return lambda n: data.draw(st.integers(0, n - 1))


def traced_peak(work: Callable[[], object]) -> int:
    """Bytes that Python and numpy had allocated at once, beyond what was there before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def cap(num_files_bytes: int) -> int:
    """What decoding the subject may allocate: some copies of the files and of what they change."""
    return (1 << 18) + 8 * num_files_bytes + 24 * SCHEMA.num_elements


@settings(deadline=None)
@given(NAMES, st.data())
def test_damage_behind_right_checksums_is_refused_by_name(
    encoding: str, data: st.DataObject
) -> None:
    part = damaged_part(SUBJECT.parts[encoding], choose_with(data), SCHEMA)
    assert traced_peak(lambda: check_decoding([part], SUBJECT)) < cap(len(part))


@settings(deadline=None)
@given(NAMES, st.data())
def test_damaged_reordered_and_foreign_parts_are_refused_or_harmless(
    encoding: str, data: st.DataObject
) -> None:
    choose = choose_with(data)
    parts = list(SUBJECT.several[encoding])
    assert len(parts) > 2
    order = data.draw(st.permutations(range(len(parts))))
    shuffled = [parts[at] for at in order]
    assert check_decoding(shuffled, SUBJECT) is None
    at = choose(len(parts))
    kind = choose(3)
    if kind == 0:
        shuffled[at] = damaged_part(shuffled[at], choose, SCHEMA) if split(shuffled[at])[1] else b""
    elif kind == 1:
        other = SUBJECT.several[sorted(ENCODINGS)[choose(len(ENCODINGS))]]
        shuffled[at] = other[choose(len(other))]
    else:
        del shuffled[at]
        assert isinstance(check_decoding(shuffled, SUBJECT), CorruptPatchError)
    check_decoding(shuffled, SUBJECT)


@settings(deadline=None, max_examples=300)
@given(NAMES, st.data())
def test_a_decoder_keeps_its_promises_whatever_the_payload(
    encoding: str, data: st.DataObject
) -> None:
    header, payloads = split(SUBJECT.parts[encoding])
    choose = choose_with(data)
    at = choose(len(payloads))
    entry = header.buckets[at]
    payload = damaged_payload(payloads[at], choose, payloads[choose(len(payloads))])
    count = entry.num_changed if choose(4) else 1 + choose(entry.bucket.num_elements)
    check_payload(encoding, payload, count, entry.bucket, SUBJECT)


@settings(deadline=None)
@given(NAMES, st.data())
def test_what_is_accepted_means_the_same_to_the_reference(
    encoding: str, data: st.DataObject
) -> None:
    """Few injuries survive the checks; of those the digest would stop most. Here it looks away."""
    header, payloads = split(SUBJECT.parts[encoding])
    choose = choose_with(data)
    at = choose(len(payloads))
    payloads[at] = damaged_payload(payloads[at], choose, payloads[choose(len(payloads))])
    (part,) = [joined(header, header.buckets, payloads)]
    try:
        decode_parts([part], SUBJECT.old, SUBJECT.before, threads=1)
    except NAMED_ERRORS as error:
        if "leads to weights" not in str(error):
            return
    by_reference = {i: SUBJECT.old.words_at(i).copy() for i in range(len(SCHEMA))}
    reference.apply_part(part, SCHEMA, by_reference)
    lanes = [reference.lanes(by_reference[i].tobytes()) for i in range(len(SCHEMA))]
    honest = replace(
        header, digest_after=DigestState(SCHEMA, np.array(lanes, np.uint64)).version_digest()
    )
    part = joined(honest, header.buckets, payloads)
    update, _ = decode_parts([part], SUBJECT.old, SUBJECT.before, threads=1)
    copy = HostWeights.load(SUBJECT.old)
    update.apply(copy, threads=1)
    assert all(np.array_equal(by_reference[i], copy.words_at(i)) for i in range(len(SCHEMA)))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, 8, 1 << 62]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(NAMES, JSON, st.data())
def test_headers_with_anything_anywhere_are_refused_or_harmless(
    encoding: str, value: object, data: st.DataObject
) -> None:
    fields, payloads = text_of(SUBJECT.parts[encoding])
    holder: Any = fields
    path = st.integers(0, 5)
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if data.draw(path) == 0 or not isinstance(holder[key], (dict, list)) or not holder[key]:
            break
        holder = holder[key]
    holder[key] = value
    part = with_text(json.dumps(fields).encode(), payloads)
    assert traced_peak(lambda: check_decoding([part], SUBJECT)) < cap(len(part)) + (1 << 19)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_cut_of_a_part_is_refused(encoding: str) -> None:
    part = SUBJECT.parts[encoding]
    for size in [*range(0, PREAMBLE_BYTES + 3), *range(0, len(part), 61), len(part) - 1]:
        assert isinstance(check_decoding([part[:size]], SUBJECT), CorruptPatchError)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_cut_of_a_payload_is_refused(encoding: str) -> None:
    header, payloads = split(SUBJECT.parts[encoding])
    seen = set()
    for entry, payload in zip(header.buckets, payloads, strict=True):
        if entry.bucket.dtype in seen:
            continue
        seen.add(entry.bucket.dtype)
        for size in range(len(payload)):
            assert check_payload(encoding, payload[:size], entry.num_changed, entry.bucket, SUBJECT)
        longer = payload + b"\0"
        assert check_payload(encoding, longer, entry.num_changed, entry.bucket, SUBJECT)


FEW_VALUES = sorted({0, 1, 2, 3, 5, 14, 0x1B, 0x1C, 0x1F, 0x3F, 0x40, 0x7F, 0x80, 0xFB, 0xFC, 0xFF})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_early_byte_of_a_payload_may_be_anything(encoding: str) -> None:
    """Forms, lengths, class tables, and the first bytes of compressed streams."""
    header, payloads = split(SUBJECT.parts[encoding])
    by_dtype = {
        entry.bucket.dtype: (entry, payload)
        for entry, payload in zip(header.buckets, payloads, strict=True)
    }
    for entry, payload in by_dtype.values():
        of_floats = entry.bucket.dtype == "BF16"
        for at in range(min(len(payload), 32 if of_floats else 14)):
            for value in range(0, 256, 2) if of_floats and at < 12 else FEW_VALUES:
                data = payload[:at] + bytes([value]) + payload[at + 1 :]
                check_payload(encoding, data, entry.num_changed, entry.bucket, SUBJECT)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_base_of_the_same_shape_is_refused(encoding: str) -> None:
    part = SUBJECT.parts[encoding]
    for density in (0.0003, 0.01, 0.5):
        drifted = changed(SUBJECT.old, density, 11)
        with pytest.raises(BaseMismatchError):
            decode_parts([part], drifted, DigestState.of(drifted, threads=1), threads=1)
        error = check_decoding([part], SUBJECT, drifted)
        assert isinstance(error, CorruptPatchError)


def stream(form: int, body: bytes) -> bytes:
    return struct.pack("<BI", form, len(body)) + body


def frame(num_bytes: int) -> bytes:
    """A zstd stream of zeros: 268 million of them take some 8 kB."""
    return stream(2, zstandard.ZstdCompressor(write_content_size=True).compress(bytes(num_bytes)))


def pco(numbers: Sequence[int], code: str) -> bytes:
    from pcodec import ChunkConfig

    return bytes(standalone.simple_compress(np.array(numbers, code), ChunkConfig()))


BF16_BUCKET = next(e for e in split(SUBJECT.parts["gaps"])[0].buckets if e.bucket.dtype == "BF16")


def test_bombs_are_refused_before_they_go_off() -> None:
    bucket: Bucket = BF16_BUCKET.bucket
    huge = frame(1 << 28)
    bombs = [
        ("gaps", huge + huge),
        ("gaps", stream(1, pco([7] * (1 << 22), "<u4")) * 2),
        ("gaps", stream(1, pco([1] * 5, "<u8")) * 2),
        ("dense", b"\0" + huge * 2),
        ("dense", b"\1" + huge + stream(0, b"") * 2),
        ("dense", b"\0" + stream(1, pco([0] * (1 << 22), "<u2")) * 2),
    ]
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for encoding, payload in bombs:
        for count in (1, 5, bucket.num_elements):

            def work(
                encoding: str = encoding, payload: bytes = payload, count: int = count
            ) -> None:
                error = check_payload(encoding, payload, count, bucket, SUBJECT)
                assert isinstance(error, CorruptPatchError)

            assert traced_peak(work) < 40 * bucket.num_elements + 2 * len(payload) + (1 << 16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 30_000


@pytest.mark.parametrize("filler", ["[]", "{}", '"ab"', "999", '["",[0,0,8],"",1,0,"0"]'])
def test_a_header_of_millions_of_objects_is_refused_before_they_are_made(filler: str) -> None:
    """It takes 3 kB compressed; its objects would take up to 800 MB."""
    fields, _ = text_of(SUBJECT.parts["gaps"])
    fields["buckets"] = "here"
    rows = ",".join([filler] * ((1 << 24) // len(filler)))
    part = with_text(json.dumps(fields).replace('"here"', f"[{rows}]").encode(), b"")
    assert len(part) < 5000
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = check_decoding([part], SUBJECT)
    assert "uncompressed are allowed" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 30_000


def test_a_header_of_as_many_slices_as_a_schema_allows_is_within_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each eight words of each tensor are a bucket of their own, and the schema is embedded."""
    monkeypatch.setattr("stitch.codec.encode.MOST_SHARING", 0)
    encoder = PatchEncoder(
        SUBJECT.old,
        changed(SUBJECT.old, 1.0, 5),
        before=SUBJECT.before,
        encoding="gaps",
        threads=1,
        max_bucket_elements=8,
        embed_schema=True,
    )
    (part,) = encoder.parts()
    text_bytes = struct.unpack_from("<I", part, 16)[0]
    assert text_bytes < most_header_bytes(SCHEMA) < 10 * text_bytes
    decode_parts([part], SUBJECT.old, SUBJECT.before, threads=1)


def test_pcodec_streams_that_lie_in_any_byte_are_refused_or_decoded_in_bounds() -> None:
    """Headers that claim other numbers, types, modes, or billions of anything."""
    bucket = BF16_BUCKET.bucket
    rng = np.random.default_rng(5)
    gaps = pco(rng.geometric(0.3, 40), "<u4")
    steps = stream(0, np.ones(40, "<i2").tobytes())
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(len(gaps)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, gaps[at] ^ 1, gaps[at] ^ 0x10, gaps[at] ^ 0x80):
            body = gaps[:at] + bytes([value]) + gaps[at + 1 :]
            check_payload("gaps", stream(1, body) + steps, 40, bucket, SUBJECT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 30_000


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F64"])
def test_a_short_payload_for_a_large_bucket_allocates_what_the_bucket_allows(
    encoding: str, dtype: str
) -> None:
    """The table may say that all 2^20 elements change; so much may be allocated, and no more."""
    size = 1 << 20
    schema = schema_of(a=(dtype, (size,)))
    weights = HostWeights.allocate(schema)
    other = HostWeights.load(weights)
    other.words_at(0)[::5] += 1
    (part,) = PatchEncoder(weights, other, encoding=encoding, threads=1).parts()
    before = DigestState.of(weights, threads=1)
    header, (honest,) = split(part)
    for payload in (honest[: len(honest) // 2], honest[:20], bytes(40), b"\1" + bytes(60)):
        for count in (1, size // 5, size):
            entry = replace(header.buckets[0], num_changed=count)
            bad = joined(header, [entry], [payload])

            def work(bad: bytes = bad) -> None:
                with pytest.raises(CorruptPatchError):
                    decode_parts([bad], weights, before, threads=1)

            assert traced_peak(work) < size * (24 + 4 * weights.words_at(0).itemsize) + (1 << 17)
