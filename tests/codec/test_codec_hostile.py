"""Broken and hostile patches: one of three errors, and nothing is written."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from codec_cases import changed, digest_of, mixed_schema, random_weights, same_bits, schema_of
from hypothesis import given
from hypothesis import strategies as st

from stitch.codec import Bucket, DigestState, PatchEncoder, Slice, decode_parts, read_header
from stitch.codec.patch import PREAMBLE_BYTES, Entry, PatchHeader, payload_checksum, write_part
from stitch.errors import BaseMismatchError, CorruptPatchError, UnsupportedFormatError
from stitch.tensors import HostWeights

THE_ERRORS = (CorruptPatchError, UnsupportedFormatError, BaseMismatchError)

OLD = random_weights(mixed_schema(), 1)
NEW = changed(OLD, 0.3, 2)
BEFORE = DigestState.of(OLD, threads=1)


def parts_with(encoding: str, max_part_bytes: int | None = 700) -> list[bytes]:
    encoder = PatchEncoder(
        OLD,
        NEW,
        before=BEFORE,
        encoding=encoding,
        threads=1,
        max_part_bytes=max_part_bytes,
        max_bucket_elements=512,
    )
    return list(encoder.parts())


PARTS = {encoding: parts_with(encoding) for encoding in ("gaps", "ranks", "dense")}
WHOLE = {encoding: parts_with(encoding, None) for encoding in ("gaps", "ranks", "dense")}


def refused(parts: list[bytes], old: HostWeights = OLD, before: DigestState = BEFORE) -> str:
    """The message of the error that decoding raises; the weights are as before."""
    copy = HostWeights.load(old)
    with pytest.raises(THE_ERRORS) as caught:
        decode_parts(parts, old, before, threads=1)
    assert same_bits(copy, old)
    return str(caught.value)


def refused_or_exact(parts: list[bytes]) -> None:
    """Decoding raises one of the errors, or gives exactly the new weights."""
    try:
        update, after = decode_parts(parts, OLD, BEFORE, threads=1)
    except THE_ERRORS:
        return
    assert after.version_digest() == digest_of(NEW)
    copy = HostWeights.load(OLD)
    update.apply(copy)
    assert same_bits(copy, NEW)


def rebuilt(part: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The same part with a changed JSON header and valid checksums over it."""
    packed = struct.unpack_from("<8sIII", part)[2]
    text = zstandard.decompress(part[PREAMBLE_BYTES : PREAMBLE_BYTES + packed])
    fields = json.loads(text)
    replacement = change(fields)
    return with_header(
        json.dumps(fields if replacement is None else replacement).encode(),
        part[PREAMBLE_BYTES + packed :],
    )


def with_header(text: bytes, payloads: bytes) -> bytes:
    packed = zstandard.compress(text)
    preamble = struct.pack("<8sIII", b"\x89STITCH\n", 1, len(packed), len(text))
    return preamble + blake3(preamble + packed).digest(length=16) + packed + payloads


def set_field(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields[key] = value

    return change


def set_row(column: int, value: object, row: int = 0) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields["buckets"][row][column] = value

    return change


@given(st.sampled_from(["gaps", "ranks", "dense"]), st.data())
def test_truncated_parts_are_refused(encoding: str, data: st.DataObject) -> None:
    parts = PARTS[encoding]
    which = data.draw(st.integers(0, len(parts) - 1))
    keep = data.draw(st.integers(0, len(parts[which]) - 1))
    refused([*parts[:which], parts[which][:keep], *parts[which + 1 :]])


@given(st.sampled_from(["gaps", "ranks", "dense"]), st.data())
def test_flipped_bits_are_refused(encoding: str, data: st.DataObject) -> None:
    parts = PARTS[encoding]
    which = data.draw(st.integers(0, len(parts) - 1))
    at = data.draw(st.integers(0, 8 * len(parts[which]) - 1))
    altered = bytearray(parts[which])
    altered[at // 8] ^= 1 << (at % 8)
    refused([*parts[:which], bytes(altered), *parts[which + 1 :]])


@given(st.sampled_from(["gaps", "ranks", "dense"]), st.data())
def test_spliced_parts_are_refused_or_were_equal_anyway(encoding: str, data: st.DataObject) -> None:
    (one,) = WHOLE[encoding]
    other = data.draw(st.sampled_from([*PARTS["gaps"], *PARTS["dense"], *WHOLE["dense"]]))
    cut = data.draw(st.integers(0, len(one)))
    refused_or_exact([one[:cut] + other[data.draw(st.integers(0, len(other))) :]])


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    refused([noise])
    refused([b"\x89STITCH\n" + noise])
    refused([with_header(noise, b"")])


def test_bytes_after_the_end_are_refused() -> None:
    for encoding in ("gaps", "ranks", "dense"):
        assert "its table accounts for" in refused([WHOLE[encoding][0] + b"\0"])
    (empty,) = PatchEncoder(OLD, OLD, threads=1).parts()
    assert "its table accounts for" in refused([empty + b"\0"])


@pytest.mark.parametrize("encoding", ["gaps", "ranks", "dense"])
def test_missing_repeated_and_foreign_parts_are_refused(encoding: str) -> None:
    parts = PARTS[encoding]
    assert len(parts) > 2
    assert "each of its parts once" in refused([])
    assert "each of its parts once" in refused(parts[1:])
    assert "each of its parts once" in refused([parts[0], *parts])
    assert "each of its parts once" in refused([parts[0], *parts[2:]])
    assert "last" in refused(parts[:-1])
    assert "last" in refused([*parts, rebuilt(parts[-1], set_field("part", len(parts)))])


def test_parts_of_two_patches_are_not_mixed() -> None:
    other = changed(OLD, 0.3, 77)
    foreign = list(
        PatchEncoder(
            OLD, other, before=BEFORE, threads=1, max_part_bytes=700, max_bucket_elements=512,
            encoding="gaps",
        ).parts()
    )  # fmt: skip
    mixed = [foreign[0], *PARTS["gaps"][1:]]
    refused(mixed)


def test_a_patch_for_another_state_is_refused_with_the_next_step() -> None:
    wrong = changed(OLD, 0.01, 9)
    message = refused(WHOLE["gaps"], wrong, DigestState.of(wrong))
    assert BEFORE.version_digest() in message
    assert digest_of(wrong) in message
    assert "start again from the base or an anchor" in message
    with pytest.raises(BaseMismatchError):
        decode_parts(WHOLE["gaps"], wrong, DigestState.of(wrong))


def test_weights_that_are_not_what_their_digest_says_are_found_out() -> None:
    for encoding in ("gaps", "ranks", "dense"):
        update, _ = decode_parts(WHOLE[encoding], OLD, BEFORE)
        first = update.updates[0]
        drifted = HostWeights.load(OLD)
        drifted.words_at(first.tensor)[first.first] ^= 1
        assert "leads to weights with digest" in refused(WHOLE[encoding], drifted)


def test_a_patch_for_another_schema_is_refused() -> None:
    other = random_weights(schema_of(a=("BF16", (8,))), 1)
    assert "another model or view" in refused(WHOLE["gaps"], other, DigestState.of(other))


def test_the_result_must_have_the_digest_that_the_manifest_says() -> None:
    after = digest_of(NEW)
    decode_parts(WHOLE["gaps"], OLD, BEFORE, digest_after=after)
    with pytest.raises(CorruptPatchError, match=f"digest {after}, its manifest says {'0' * 32}"):
        decode_parts(WHOLE["gaps"], OLD, BEFORE, digest_after="0" * 32)


def test_later_formats_and_encodings_are_unsupported_not_corrupt() -> None:
    data = bytearray(WHOLE["gaps"][0])
    data[8] = 2
    with pytest.raises(UnsupportedFormatError, match="format version 2, this release reads 1"):
        read_header(bytes(data))
    part = rebuilt(WHOLE["gaps"][0], set_row(2, "braids"))
    with pytest.raises(UnsupportedFormatError, match=r"bucket 0 .*'braids' is not one of gaps"):
        decode_parts([part], OLD, BEFORE)
    assert read_header(part).encodings["braids"] == 1


LIES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("header as a list", lambda fields: [fields]),
    ("a key too many", set_field("more", 1)),
    ("a key missing", lambda fields: fields.pop("num_absent") and None),
    ("part negative", set_field("part", -1)),
    ("part as text", set_field("part", "0")),
    ("part as a truth value", set_field("part", False)),
    ("last as a number", set_field("last", 1)),
    ("last but without digest", set_field("digest_after", None)),
    ("digest too short", set_field("digest_after", "0" * 31)),
    ("digest in upper case", set_field("digest_before", "A" * 32)),
    ("digest of the result altered", set_field("digest_after", "0" * 32)),
    ("schema digest altered", set_field("schema_digest", "0" * 32)),
    ("too few elements compared", set_field("num_elements", 1)),
    ("too many elements compared", set_field("num_elements", 1 << 40)),
    ("elements as a fraction", set_field("num_elements", 1.5)),
    ("absent negative", set_field("num_absent", -1)),
    ("buckets as an object", set_field("buckets", {})),
    ("no buckets", set_field("buckets", [])),
    ("a bucket too short", set_field("buckets", [["BF16"]])),
    ("dtype of other words", set_row(0, "F32")),
    ("dtype of the same width", set_row(0, "F16")),
    ("unknown dtype", set_row(0, "Q9")),
    ("dtype as a number", set_row(0, 3)),
    ("no slices", set_row(1, [])),
    ("half a slice", set_row(1, [0, 0])),
    ("slice of no tensor", set_row(1, [99, 0, 512])),
    ("slice of a huge index", set_row(1, [1 << 61, 0, 512])),
    ("slice reversed", set_row(1, [0, 512, 0])),
    ("slice empty", set_row(1, [0, 8, 8])),
    ("slice beyond the tensor", set_row(1, [0, 0, 1 << 40])),
    ("slice moved", set_row(1, [0, 8, 520])),
    ("slice shortened", set_row(1, [0, 0, 504])),
    ("slice twice", set_row(1, [0, 0, 512, 0, 0, 512])),
    ("slice as text", set_row(1, ["0", 0, 512])),
    ("slice with a fraction", set_row(1, [0, 0.0, 512])),
    ("encoding as a number", set_row(2, 1)),
    ("no change", set_row(3, 0)),
    ("one change more", lambda f: set_row(3, f["buckets"][0][3] + 1)(f)),
    ("one change fewer", lambda f: set_row(3, f["buckets"][0][3] - 1)(f)),
    ("changes negative", set_row(3, -1)),
    ("changes without end", set_row(3, 1 << 60)),
    ("length without end", set_row(4, 1 << 60)),
    ("length too short", lambda f: set_row(4, f["buckets"][0][4] - 1)(f)),
    ("length negative", set_row(4, -1)),
    ("checksum altered", set_row(5, "0" * 32)),
    ("checksum of another bucket", lambda f: set_row(5, f["buckets"][1][5])(f)),
    ("buckets swapped", lambda f: f["buckets"].reverse()),
    ("a bucket repeated", lambda f: f["buckets"].append(f["buckets"][0])),
    ("a bucket dropped", lambda f: f["buckets"].pop() and None),
    ("an empty schema", set_field("schema", [])),
    ("a foreign schema", set_field("schema", [["a", "BF16", [8], 16]])),
    ("an impossible schema", set_field("schema", [["a", "BF16", [8], 17]])),
    ("an unsorted schema", set_field("schema", [["b", "U8", [1], 1], ["a", "U8", [1], 1]])),
    ("a schema of numbers", set_field("schema", [1, 2])),
    ("a schema with a huge shape", set_field("schema", [["a", "U8", [1 << 70], 1]])),
]


@pytest.mark.parametrize("encoding", ["gaps", "ranks", "dense"])
@pytest.mark.parametrize("lie", [lie for _, lie in LIES], ids=[name for name, _ in LIES])
def test_lies_in_the_header_are_refused_though_its_checksum_is_right(
    lie: Callable[[dict[str, Any]], object], encoding: str
) -> None:
    refused([rebuilt(WHOLE[encoding][0], lie)])


@pytest.mark.parametrize(
    "text",
    [
        b'{"part":0,"part":0}',
        b'{"part":NaN}',
        b"[" * 100_000,
        b'{"part":' + b"9" * 10_000 + b"}",
        '{"part":"é"}'.encode(),
        '{"part":0}'.encode("utf-16"),
        b"null",
        b"",
    ],
)
def test_headers_that_are_not_plain_json_objects_are_refused(text: bytes) -> None:
    refused([with_header(text, b"")])


def test_a_header_bomb_is_refused_before_it_is_unpacked() -> None:
    packed = zstandard.compress(b" " * (1 << 26))
    preamble = struct.pack("<8sIII", b"\x89STITCH\n", 1, len(packed), 1 << 26)
    checksum = blake3(preamble + packed).digest(length=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "are allowed" in refused([preamble + checksum + packed])
    understated = struct.pack("<8sIII", b"\x89STITCH\n", 1, len(packed), 100)
    checksum = blake3(understated + packed).digest(length=16)
    assert "zstd frame of" in refused([understated + checksum + packed])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000


def forged(payload: bytes, encoding: str, num_changed: int, num_words: int = 512) -> bytes:
    """A valid file around a hand-made payload for tensor 0 of OLD."""
    entry = Entry(
        bucket=Bucket("BF16", (Slice(0, 0, num_words),)),
        encoding=encoding,
        num_changed=num_changed,
        offset=0,
        num_bytes=len(payload),
        checksum=payload_checksum(payload),
    )
    header = PatchHeader(
        format=1,
        part=0,
        last=True,
        schema_digest=OLD.schema.digest,
        digest_before=BEFORE.version_digest(),
        digest_after="0" * 32,
        num_elements=OLD.schema.num_elements,
        num_absent=0,
        buckets=(entry,),
        schema=None,
    )
    return write_part(header, [payload])


def raw(numbers: list[int], code: str) -> bytes:
    data = np.array(numbers, code).tobytes()
    return struct.pack("<BI", 0, len(data)) + data


@pytest.mark.parametrize(
    ("payload", "num_changed", "message"),
    [
        (raw([511], "<u4") + raw([1], "<i2"), 1, "leads to weights"),
        (raw([512], "<u4") + raw([1], "<i2"), 1, "position 512 is outside the bucket of 512"),
        (raw([0, 2**32 - 1], "<u4") + raw([1, 1], "<i2"), 2, "outside the bucket"),
        (raw([2**32 - 1] * 500, "<u4") + raw([1] * 500, "<i2"), 500, "outside the bucket"),
        (raw([5], "<u4") + raw([0], "<i2"), 1, "a step is zero"),
        (raw([5], "<u4") + raw([1], "<i2") + b"\0", 1, "1 bytes after the changes"),
        (raw([5], "<u4") + raw([1], "<i2")[:-1], 1, "steps: stream of 2 bytes"),
        (raw([5], "<u4") + raw([1], "<i4"), 1, "steps: 4 raw bytes"),
        (raw([5], "<u4"), 1, "steps: 0 bytes left"),
        (raw([5, 5], "<u4") + raw([1, 1], "<i2"), 3, "gaps: 8 raw bytes"),
        (b"", 1, "gaps: 0 bytes left"),
    ],
)
def test_forged_gaps_are_refused_by_name(payload: bytes, num_changed: int, message: str) -> None:
    text = refused([forged(payload, "gaps", num_changed)])
    assert message in text
    if "leads to" not in message:
        assert "patch part 0, bucket 0 (BF16 tensor 0 [0:512])" in text


def test_a_step_too_wide_for_an_8_bit_word_is_refused() -> None:
    weights = random_weights(schema_of(a=("U8", (16,))), 1)
    before = DigestState.of(weights)
    payload = raw([3], "<u4") + raw([256], "<i2")
    (part,) = PatchEncoder(weights, weights).parts()
    header = replace(
        read_header(part),
        buckets=(
            Entry(
                bucket=Bucket("U8", (Slice(0, 0, 16),)),
                encoding="gaps",
                num_changed=1,
                offset=0,
                num_bytes=len(payload),
                checksum=payload_checksum(payload),
            ),
        ),
    )
    assert "too wide" in refused([write_part(header, [payload])], weights, before)


def squeezed(content: bytes) -> bytes:
    """A zstd stream."""
    body = zstandard.ZstdCompressor(write_content_size=True).compress(content)
    return struct.pack("<BI", 2, len(body)) + body


FORGED_DENSE: list[tuple[bytes, int, str]] = [
    (b"\0" + raw([1] + [0] * 511, "u1") + squeezed(bytes(512)), 1, "leads to weights"),
    (b"\0" + raw([1] + [0] * 511, "u1") + squeezed(bytes(512)), 2, "1 elements change, the table"),
    (b"\0" + squeezed(bytes(512)) * 2, 1, "0 elements change"),
    (b"\0" + squeezed(bytes(512)) * 3, 1, "bytes after the planes"),
    (b"\0" + squeezed(bytes(512)), 1, "plane 1: 0 bytes left"),
    (b"\0" + squeezed(bytes(511)) * 2, 1, "plane 0: zstd frame of 511 bytes, expected 512"),
    (b"\0" + squeezed(bytes(1 << 28)) * 2, 1, "plane 0: zstd frame of 268435456 bytes"),
    (b"\1" + raw([1] + [0] * 127, "u1") + raw([], "u1") * 2, 1, "leads to weights"),
    (b"\1" + raw([1] + [0] * 127, "u1") + raw([], "u1") * 2, 2, "1 elements change, the table"),
    (b"\1" + raw([3] + [0] * 127, "u1") + raw([], "u1") * 2, 1, "plane 0: 0 raw bytes, expected 1"),
    (b"\1" + raw([3] + [0] * 127, "u1") + raw([0], "u1") * 2, 1, "leads to weights"),
    (b"\1" + raw([3] + [0] * 127, "u1") + raw([255], "u1") * 2, 1, "a step is too wide"),
    (b"\1" + raw([3] + [0] * 127, "u1") + raw([0], "u1") * 3, 1, "bytes after the planes"),
    (b"\1" + raw([0] * 128, "u1") + raw([], "u1") * 2, 1, "0 elements change"),
    (b"\1" + raw([0] * 127, "u1") + raw([], "u1") * 2, 1, "tokens: 127 raw bytes, expected 128"),
    (b"\1" + squeezed(bytes(1 << 28)) + raw([], "u1") * 2, 1, "zstd frame of 268435456 bytes"),
    (b"\1", 1, "tokens: 0 bytes left"),
    (b"\2", 1, "unknown form 2"),
    (b"", 1, "the payload is empty"),
]


@pytest.mark.parametrize(("payload", "num_changed", "message"), FORGED_DENSE)
def test_forged_dense_payloads_are_refused(payload: bytes, num_changed: int, message: str) -> None:
    text = refused([forged(payload, "dense", num_changed)])
    assert message in text
    if "leads to" not in message:
        assert "patch part 0, bucket 0 (BF16 tensor 0 [0:512])" in text


def test_tokens_after_the_last_element_are_refused() -> None:
    for beyond in (1, 2, 3):
        lied = b"\1" + raw([1 << 2 * beyond], "u1") + raw([], "u1") * 2
        weights = random_weights(schema_of(a=("BF16", (beyond,))), 1)
        (part,) = PatchEncoder(weights, changed(weights, 1.0, 2), encoding="dense").parts()
        header = read_header(part)
        entry = replace(
            header.buckets[0], num_bytes=len(lied), checksum=payload_checksum(lied), num_changed=1
        )
        forgery = write_part(replace(header, buckets=(entry,)), [lied])
        assert "after the last element" in refused([forgery], weights, DigestState.of(weights))


def test_a_frame_that_understates_its_size_is_refused() -> None:
    honest = bytearray(squeezed(bytes(5000)))
    assert int.from_bytes(honest[10:12], "little") + 256 == 5000
    honest[10:12] = (512 - 256).to_bytes(2, "little")
    refused([forged(b"\0" + bytes(honest) * 2, "dense", 1)])


@given(st.sampled_from(["gaps", "ranks", "dense"]), st.data())
def test_altered_payloads_with_right_checksums_are_refused_or_exact(
    encoding: str, data: st.DataObject
) -> None:
    """What a forger with a text editor can do: only the digest stands in the way."""
    (part,) = WHOLE[encoding]
    header = read_header(part)
    payloads = [bytearray(part[e.offset : e.offset + e.num_bytes]) for e in header.buckets]
    payload = data.draw(st.sampled_from(payloads))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    entries = tuple(
        replace(e, checksum=payload_checksum(p), num_bytes=len(p))
        for e, p in zip(header.buckets, payloads, strict=True)
    )
    refused_or_exact([write_part(replace(header, buckets=entries), [bytes(p) for p in payloads])])


def test_a_shape_of_very_many_dimensions_is_refused_before_they_are_multiplied() -> None:
    bomb = set_field("schema", [["a", "U8", [2**62] * 200_000, 0]])
    with pytest.raises(CorruptPatchError, match="200000 dimensions"):
        read_header(rebuilt(WHOLE["gaps"][0], bomb))
