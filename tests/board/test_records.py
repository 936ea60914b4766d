"""Records: canonical bytes, strict parsing, errors that name key and field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from board_kit import digest, heartbeat, run_record
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import (
    CorruptRecordError,
    StitchError,
    UnsupportedFormatError,
    UsageError,
)
from stitch.records import (
    AnchorRecord,
    BlobRef,
    EpochRecord,
    Head,
    Heartbeat,
    Manifest,
    MergedPatch,
    RunRecord,
)
from stitch.types import PatchStats, VersionRef

BLOB = BlobRef(name="w-0.patch", num_bytes=9, blake3="ab" * 32)
MANIFEST = Manifest(
    run="math",
    version=7,
    base_version=6,
    digest_before=digest(6),
    digest_after=digest(7),
    schema_digest="0" * 32,
    blobs=(BLOB,),
    stats=PatchStats(num_elements=48, num_changed=2, num_bytes=9, encodings={"gaps": 1}),
    step=None,
    created_unix_s=1.5,
    writer="trainer 0 on host ü",
    attempt="a1",
    epoch=3,
)
ANCHOR = AnchorRecord(
    run="math",
    version=7,
    digest=digest(7),
    schema_digest="0" * 32,
    files=(BlobRef(name="anchor-1-model.safetensors", num_bytes=9, blake3="cd" * 32),),
    num_bytes=9,
    created_unix_s=2.0,
    writer="w",
)
MERGED = MergedPatch(
    run="math",
    version=8,
    base_version=4,
    digest_before=digest(4),
    digest_after=digest(8),
    schema_digest="0" * 32,
    blobs=(BLOB,),
    stats=PatchStats(num_elements=48, num_changed=2, num_bytes=9, encodings={"ranks": 1}),
    created_unix_s=1.5,
    writer="w",
)
RECORDS: list[Any] = [
    run_record(parent=VersionRef("old", 9), assets=(BLOB,)),
    run_record(),
    MANIFEST,
    MERGED,
    ANCHOR,
    EpochRecord(epoch=2, run="math", writer="w", created_unix_s=0.25),
    Head(run="math", version=4),
    heartbeat(),
    heartbeat(run=None, applied=None, newest_seen=None),
]
KINDS = [RunRecord, Manifest, MergedPatch, AnchorRecord, EpochRecord, Head, Heartbeat]


def altered(record: Any, **changes: object) -> bytes:
    """The record's JSON with fields replaced; `...` removes one."""
    values = json.loads(record.to_json_bytes()) | changes
    return json.dumps({k: v for k, v in values.items() if v is not ...}).encode()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_survives_a_round_trip(record: Any) -> None:
    data = record.to_json_bytes()
    again = type(record).parse(data, "the/key")
    assert again == record
    assert again.to_json_bytes() == data
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_field_is_required_and_typed(record: Any) -> None:
    for name, value in json.loads(record.to_json_bytes()).items():
        wrong = {} if isinstance(value, list) else [] if not isinstance(value, str) else 1
        for change in (..., wrong):
            with pytest.raises(CorruptRecordError, match=rf"the/key: field {name} "):
                type(record).parse(altered(record, **{name: change}), "the/key")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_fields_of_a_later_release_are_ignored_but_a_later_format_is_not(record: Any) -> None:
    assert type(record).parse(altered(record, signature="abc"), "k") == record
    with pytest.raises(UnsupportedFormatError, match="k: format 2"):
        type(record).parse(altered(record, format=2), "k")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 300, b"{", b"[]", b"null", b"\xff\xfe", b'{"format":1,"format":1}',
     b'{"format":NaN}', b'{"format":true}', b"[" * 100_000, b'{"format":' + b"9" * 5000 + b"}"],
    ids=["empty", "zeros", "cut", "list", "null", "not utf-8", "repeated", "nan", "bool", "deep",
         "huge number"],
)  # fmt: skip
def test_bytes_that_are_no_record_are_refused_by_key(kind: Any, data: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="the/key"):
        kind.parse(data, "the/key")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": 10**9},
        {"version": 7.0},
        {"version": True},
        {"base_version": 5},
        {"blobs": []},
        {"blobs": [BLOB.to_json(), BLOB.to_json()]},
        {"blobs": [BLOB.to_json(), BLOB.to_json() | {"name": "W-0.PATCH"}]},
        {"blobs": [BLOB.to_json() | {"num_bytes": -1}]},
        {"blobs": [BLOB.to_json() | {"blake3": "AB" * 32}]},
        {"digest_after": "xyz"},
        {"created_unix_s": "now"},
        {"kind": "merged"},
        {"stats": {"num_elements": 1, "num_changed": 2, "num_bytes": 1, "encodings": {}}},
        {"run": "epochs"},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_true_is_refused(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(CorruptRecordError, match=f"k: field {name}"):
        Manifest.parse(altered(MANIFEST, **changes), "k")


HOSTILE_NAMES = [
    "../x", "..", ".", "", "a/b", "/etc/passwd", "a\\b", "a\0b", "~/x", ".hidden", "a b", "é",
    "x" * 201, "a\n", "C:x",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=repr)
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        BlobRef(name=name, num_bytes=1, blake3="ab" * 32)
    blob = BLOB.to_json() | {"name": name}
    for data, kind in (
        (altered(MANIFEST, blobs=[blob]), Manifest),
        (altered(ANCHOR, files=[blob]), AnchorRecord),
        (altered(run_record(), assets=[blob]), RunRecord),
        (altered(run_record(), run=name), RunRecord),
        (altered(heartbeat(), replica=name), Heartbeat),
    ):
        with pytest.raises(CorruptRecordError, match="k: field"):
            kind.parse(data, "k")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(data=st.binary(max_size=300), kind=st.sampled_from(KINDS))
def test_arbitrary_bytes_raise_typed_errors_only(data: bytes, kind: Any) -> None:
    with pytest.raises(StitchError):
        kind.parse(data, "k")


@given(value=json_values, record=st.sampled_from(RECORDS), data=st.data())
def test_arbitrary_field_values_raise_typed_errors_only(
    value: object, record: Any, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(vars(record))))
    with contextlib.suppress(StitchError):
        type(record).parse(altered(record, **{name: value}), "k")


@given(position=st.integers(min_value=0), record=st.sampled_from(RECORDS), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_yields_a_well_formed_record(
    position: int, record: Any, bit: int
) -> None:
    data = bytearray(record.to_json_bytes())
    data[position % len(data)] ^= 1 << bit
    try:
        again = type(record).parse(bytes(data), "k")
    except StitchError:
        return
    assert type(record).parse(again.to_json_bytes(), "k") == again
