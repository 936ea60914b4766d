"""Hostile and odd safetensors headers: each is refused with a typed error, or read exactly."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CorruptCheckpointError, SchemaMismatchError, UsageError
from stitch.tensors import open_checkpoint, read_all
from stitch.tensors.header import build_header, file_order, parse_header
from stitch.types import TensorSpec


def file_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(path)
    assert "bad.safetensors" in str(caught.value)
    return str(caught.value)


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, file_bytes(b"")])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal(tmp_path, content)


@pytest.mark.parametrize(
    "length", [13, 100_000_001, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 0xFD2FB528]
)
def test_a_header_length_beyond_the_file_is_refused_without_allocating(
    tmp_path: Path, length: int
) -> None:
    tracemalloc.start()
    message = refusal(tmp_path, file_bytes(b"{}", b"\0" * 10, length=length))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(length) in message
    assert peak < 10_000_000


def test_a_header_over_the_cap_is_refused_even_if_the_file_is_large_enough(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 150_000_000))
        file.truncate(200_000_000)
    with pytest.raises(CorruptCheckpointError, match="150000000"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b" {}", "must start with"),
        (b"[]", "must start with"),
        (b"{", "not valid JSON"),
        (b"{}x", "malformed at character 1"),
        (b'{"a" 1}', "malformed at character 5"),
        (b"{1:1}", "malformed at character"),
        (b'{"a":1,}', "needs exactly"),
        (b"{,}", "not valid JSON"),
        (b'{"' + b"a" * 9000 + b'":1}', "exceeds 8192 characters"),
        (b'{"a":\xff}', "not valid UTF-8"),
        (b"{" + b'"a":{' * 50_000, "nests too deeply"),
        (b'{"a":' + b"[" * 50_000, "nests too deeply"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            "repeats the key 'a'",
        ),
        (b'{"__metadata__":{},"__metadata__":{}}', "repeats the key '__metadata__'"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', "repeats the key"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', "-1"),
        (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', "-0"),
        (b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', "1.0"),
        (b'{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', "1e0"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', "NaN"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "999"),
        ({"a": entry("U8", [18446744073709551615, 0], 0, 0)}, "malformed shape"),
        ({"a": entry("U8", [True], 0, 1)}, "malformed shape"),
        ({"a": entry("U8", ["1"], 0, 1)}, "malformed shape"),
        ({"a": entry("U8", "1", 0, 1)}, "malformed shape"),
        ({"a": entry("U8", None, 0, 1)}, "malformed shape"),
        ({"a": entry(8, [1], 0, 1)}, "malformed dtype"),
        ({"a": entry("", [1], 0, 1)}, "malformed dtype"),
        ({"a": entry("U8\n", [1], 0, 1)}, "malformed dtype"),
        ({"a": entry("U8", [1], "0", 1)}, "malformed offsets"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, "malformed offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, "needs exactly"),
        ({"a": {**entry("U8", [1], 0, 1), "extra": 1}}, "needs exactly"),
        ({"a": 1}, "needs exactly"),
        ({"": entry("U8", [1], 0, 1)}, "cannot be named"),
        ({"a\0b": entry("U8", [1], 0, 1)}, "cannot be named"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "not valid Unicode"),
        ({"__metadata__": {"a": 1}}, "must map strings"),
        ({"__metadata__": []}, "must map strings"),
        (b'{"__metadata__":{"a":"\\udfff"}}', "not valid Unicode"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: object, words: str) -> None:
    assert words in refusal(tmp_path, file_bytes(header, b"\0"))


@pytest.mark.parametrize(
    ("start", "junk"),
    [
        (b"{", b'"a":0,'),
        (b'{"a":', b"[0],"),
        (b'{"a":[', b"0,"),
        (b'{"a":[', b"["),
        (b'{"a":"', b"x"),
        (b'{"', b"x"),
        (b'{"__metadata__":{', b'"a":"b",'),
    ],
)
def test_a_large_header_full_of_junk_is_refused_fast_and_in_little_memory(
    start: bytes, junk: bytes
) -> None:
    text = start + junk * (40_000_000 // len(junk))
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError):
        parse_header(text, 0, "junk")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000_000


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "words"),
    [
        (GOOD, 10, "truncated"),
        (GOOD, 12, "cover 11 of 12"),
        ({}, 1, "cover 0 of 1"),
        ({"a": entry("U8", [1], 1, 0)}, 8, "claims bytes"),
        ({"a": entry("U8", [1], 1, 2)}, 2, "hole of 1 bytes precedes tensor 'a'"),
        ({**GOOD, "b": entry("U8", [3], 9, 12)}, 12, "hole of 1 bytes precedes tensor 'b'"),
        ({**GOOD, "b": entry("U8", [3], 7, 10)}, 10, "'a' and 'b' overlap"),
        ({"a": entry("U8", [4], 0, 4), "e": entry("U8", [0], 2, 2)}, 4, "overlap"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, "share one byte range"),
        ({"a": entry("F32", [2], 0, 7)}, 7, "needs 8 bytes, its offsets give 7"),
        ({"a": entry("F32", [2**62, 2**62], 0, 8)}, 8, "offsets give 8"),
        ({"a": entry("F32", [], 0, 8)}, 8, "needs 4 bytes"),
        ({"a": entry("F4", [3], 0, 1)}, 1, "does not fill whole bytes"),
        ({"a": entry("F4", [2, 3], 0, 3)}, 3, "does not fill whole bytes"),
        ({"a": entry("F4", [], 0, 0)}, 0, "does not fill whole bytes"),
        ({"a": entry("F6_E2M3", [3], 0, 2)}, 2, "does not fill whole bytes"),
    ],
)
def test_ranges_that_do_not_tile_the_data_are_refused(
    tmp_path: Path, header: object, num_data_bytes: int, words: str
) -> None:
    assert words in refusal(tmp_path, file_bytes(header, bytes(num_data_bytes)))


def test_a_pickle_named_safetensors_is_refused_and_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    for protocol in range(6):
        refusal(tmp_path, pickle.dumps(Trap(), protocol=protocol))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0x9C78, 0x2078, 0x0178, 0xDA78, 0x8B1F, 0x5A42])
def test_header_lengths_that_look_like_compressed_data_are_read_as_declared(
    tmp_path: Path, length: int
) -> None:
    header = {"t": entry("U8", [4], 0, 4)}
    text = json.dumps(header).encode().ljust(length)
    path = tmp_path / "t.safetensors"
    path.write_bytes(file_bytes(text, b"abcd"))
    with open_checkpoint(path) as checkpoint:
        assert read_all(checkpoint, "t").tobytes() == b"abcd"


def test_a_compressed_file_is_not_unpacked(tmp_path: Path) -> None:
    import gzip

    refusal(tmp_path, gzip.compress(file_bytes(GOOD, bytes(11))))


def test_other_suffixes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(file_bytes(GOOD, bytes(11)))
    with pytest.raises(UsageError, match=r"neither a \.safetensors file"):
        open_checkpoint(path)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_anywhere_in_a_header_is_a_typed_error_or_a_consistent_schema(
    data: st.DataObject,
) -> None:
    text = bytearray(json.dumps({"__metadata__": {"k": "v"}, **GOOD}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(text) - 1))
        text[where : where + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        header = parse_header(bytes(text), 11, "fuzzed")
    except CorruptCheckpointError:
        return
    assert sum(extent.spec.num_bytes for extent in header.extents) == 11


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), json_values))
def test_any_json_is_a_typed_error_or_a_consistent_schema(value: dict[str, object]) -> None:
    try:
        header = parse_header(json.dumps(value).encode(), 0, "fuzzed")
    except CorruptCheckpointError:
        return
    assert sum(extent.spec.num_bytes for extent in header.extents) == 0


def test_an_unknown_dtype_is_carried_as_opaque_bytes() -> None:
    header = parse_header(json.dumps({"q": entry("NVFP3_X", [5, 5], 0, 11)}).encode(), 11, "f")
    spec = header.extents[0].spec
    assert (spec.dtype, spec.word_bytes, spec.num_words) == ("NVFP3_X", 1, 11)


def test_equal_content_gives_an_equal_header_whatever_the_metadata_order() -> None:
    metadata = {f"key{i}": str(i) for i in range(20)}
    spec = TensorSpec.of("t", "F32", [2])
    header = build_header([spec], metadata)
    assert header == build_header([spec], dict(reversed(metadata.items())))
    assert len(header) % 8 == 0


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0b", "\ud800"])
def test_names_that_the_format_cannot_hold_are_not_written(name: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        build_header([TensorSpec.of(name, "U8", [1])], {})


def test_a_header_over_the_cap_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.tensors.header.MAX_HEADER_BYTES", 40)
    with pytest.raises(SchemaMismatchError, match="exceeds 40"):
        build_header([TensorSpec.of("t", "U8", [1])], {})


def test_no_tensor_in_a_written_file_is_misaligned_after_an_odd_one() -> None:
    kinds = [("BF16", 3), ("BOOL", 5), ("F32", 1), ("I64", 7), ("F4", 2), ("F64", 1)]
    specs = [TensorSpec.of(f"t{i}", dtype, [n]) for i, (dtype, n) in enumerate(kinds)]
    offset = 0
    for spec in file_order(specs):
        assert offset % spec.word_bytes == 0
        offset += spec.num_bytes
