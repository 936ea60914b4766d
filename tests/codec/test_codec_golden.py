"""Golden files: what this format version looked like when it was fixed.

A missing file fails. `STITCH_WRITE_GOLDEN=1 pytest tests/codec/test_codec_golden.py` writes them
all anew, which is right only together with a new format version.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_cases import from_words, same_bits

from stitch.codec import (
    DigestState,
    PatchEncoder,
    UpdateSet,
    decode_parts,
    diff_update,
    read_header,
    reference,
)
from stitch.tensors import HostWeights

GOLDEN = Path(__file__).parent / "golden"
INDEX = GOLDEN / "index.json"
WRITE = bool(os.environ.get("STITCH_WRITE_GOLDEN"))

DTYPES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}
CASES = [f"{encoding}-{dtype}" for encoding in ("gaps", "ranks", "dense") for dtype in DTYPES]


def sequence(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Numbers that depend on no library: a 64-bit linear congruential generator."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        numbers.append(state >> 11)
    return np.array(numbers, np.uint64)


def weights_of(dtype: str, step: int) -> HostWeights:
    """Two tensors of one dtype; about one word in five has moved by a few units at `step` 1."""
    width = DTYPES[dtype]
    arrays = {}
    for name, count in (("alpha", 611), ("beta", 333)):
        words = (sequence(count, len(name)) % np.uint64(251)).astype(f"<u{width}")
        draws = sequence(count, 7 * len(name))
        if step:
            moved = np.where(draws % np.uint64(5) == 0, draws % np.uint64(4) + np.uint64(1), 0)
            words = words + moved.astype(words.dtype)
        arrays[name] = (dtype, words)
    return from_words(arrays)


def parts_of(case: str) -> list[bytes]:
    """Of several buckets, which do not share their payloads, and parts."""
    encoding, dtype = case.split("-")
    encoder = PatchEncoder(
        weights_of(dtype, 0),
        weights_of(dtype, 1),
        encoding=encoding,
        embed_schema=True,
        threads=1,
        max_part_bytes=100,
        max_bucket_elements=512,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stitch.codec.encode.MOST_SHARING", 0)
        return list(encoder.parts())


def compressors() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("pcodec", "zstandard")}


@pytest.fixture(scope="module")
def index() -> dict[str, Any]:
    if WRITE:
        write()
    assert INDEX.exists(), "the golden files are missing; see this module's docstring"
    loaded: dict[str, Any] = json.loads(INDEX.read_text())
    return loaded


def write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    record: dict[str, Any] = {"made_with": compressors(), "digests": {}, "parts": {}}
    for case in CASES:
        parts = parts_of(case)
        record["parts"][case] = len(parts)
        for number, part in enumerate(parts):
            (GOLDEN / f"{case}.{number}.patch").write_bytes(part)
    for dtype in DTYPES:
        states = [DigestState.of(weights_of(dtype, step)) for step in (0, 1)]
        record["digests"][dtype] = [state.version_digest() for state in states]
        update = diff_update(weights_of(dtype, 0), weights_of(dtype, 1))
        (GOLDEN / f"{dtype}.update").write_bytes(update.to_bytes(weights_of(dtype, 0).schema))
    INDEX.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def golden_parts(index: dict[str, Any], case: str) -> list[bytes]:
    return [
        (GOLDEN / f"{case}.{number}.patch").read_bytes() for number in range(index["parts"][case])
    ]


@pytest.mark.parametrize("case", CASES)
def test_golden_patches_still_decode_to_the_same_weights(case: str, index: dict[str, Any]) -> None:
    dtype = case.split("-")[1]
    old, new = weights_of(dtype, 0), weights_of(dtype, 1)
    parts = golden_parts(index, case)
    assert len(parts) > 1
    update, after = decode_parts(parts, old, DigestState.of(old))
    assert after.version_digest() == index["digests"][dtype][1]
    copy = HostWeights.load(old)
    update.apply(copy)
    assert same_bits(copy, new)
    by_reference = {i: old.words_at(i).copy() for i in range(2)}
    for part in parts:
        assert read_header(part).schema == old.schema
        reference.apply_part(part, old.schema, by_reference)
    assert all(np.array_equal(words, new.words_at(i)) for i, words in by_reference.items())


@pytest.mark.parametrize("case", CASES)
def test_encoding_still_gives_the_golden_bytes(case: str, index: dict[str, Any]) -> None:
    if index["made_with"] != compressors():
        pytest.skip(f"other releases of the compressors than {index['made_with']}")
    assert parts_of(case) == golden_parts(index, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_still_the_golden_ones(dtype: str, index: dict[str, Any]) -> None:
    for step, expected in enumerate(index["digests"][dtype]):
        weights = weights_of(dtype, step)
        assert DigestState.of(weights).version_digest() == expected
        contents = [weights.words_at(i).tobytes() for i in range(2)]
        assert reference.version_digest(weights.schema.tensors, contents) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_update_sets_are_read_and_written_the_same(
    dtype: str, index: dict[str, Any]
) -> None:
    old, new = weights_of(dtype, 0), weights_of(dtype, 1)
    data = (GOLDEN / f"{dtype}.update").read_bytes()
    copy = HostWeights.load(old)
    UpdateSet.from_bytes(data, old.schema).apply(copy)
    assert same_bits(copy, new)
    assert diff_update(old, new).to_bytes(old.schema) == data


def test_every_golden_file_is_used(index: dict[str, Any]) -> None:
    expected = {f"{case}.{n}.patch" for case in CASES for n in range(index["parts"][case])}
    expected |= {f"{dtype}.update" for dtype in DTYPES} | {INDEX.name}
    assert {path.name for path in GOLDEN.iterdir()} == expected
