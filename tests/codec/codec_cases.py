"""Schemas, weights and changes that the codec's tests share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stitch.codec import DigestState
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec

DTYPES = ("I8", "F8_E4M3", "BF16", "U16", "F32", "I32", "F64", "I64", "BOOL", "F4", "C64")


def schema_of(**shapes: tuple[str, tuple[int, ...]]) -> Schema:
    """`schema_of(a=("BF16", (4, 4)))`."""
    return Schema.of(TensorSpec.of(name, dtype, shape) for name, (dtype, shape) in shapes.items())


def mixed_schema() -> Schema:
    """Every word size, a scalar, an empty tensor, odd lengths and an opaque dtype."""
    specs = [
        TensorSpec.of("bf16.long", "BF16", (37, 29)),
        TensorSpec.of("bf16.scalar", "BF16", ()),
        TensorSpec.of("empty", "F32", (0, 7)),
        TensorSpec.of("f32", "F32", (201,)),
        TensorSpec.of("f64", "F64", (33,)),
        TensorSpec.of("f8", "F8_E4M3", (7, 19)),
        TensorSpec.of("i64", "I64", (5,)),
        TensorSpec.of("packed", "F4", (10, 10)),
        TensorSpec.of("u8", "U8", (1003,)),
        TensorSpec("unknown", "X3_Y5", (11,), 13),
    ]
    return Schema.of(specs)


def random_weights(schema: Schema, seed: int) -> HostWeights:
    """Uniform random bits, so every class of value appears."""
    rng = np.random.default_rng(seed)
    weights = HostWeights.allocate(schema)
    for index, spec in enumerate(schema.tensors):
        weights.words_at(index).view(np.uint8)[:] = rng.integers(0, 256, spec.num_bytes)
    return weights


def changed(weights: HostWeights, density: float, seed: int) -> HostWeights:
    """A copy in which about `density` of the words got new random bits."""
    rng = np.random.default_rng(seed)
    copy = HostWeights.load(weights)
    for index in range(len(weights.schema)):
        words = copy.words_at(index)
        chosen = rng.random(words.size) < density
        words[chosen] ^= (
            rng.integers(
                0, 1 << (8 * words.itemsize), words.size, dtype=words.dtype, endpoint=False
            )[chosen]
            if words.itemsize < 8
            else rng.integers(0, (1 << 64) - 1, words.size, dtype=np.uint64, endpoint=True)[chosen]
        )
    return copy


def from_words(arrays: Mapping[str, tuple[str, np.ndarray[Any, np.dtype[Any]]]]) -> HostWeights:
    """Weights from `{name: (dtype, words)}`."""
    schema = Schema.of(
        TensorSpec.of(name, dtype, (words.size,)) for name, (dtype, words) in arrays.items()
    )
    weights = HostWeights.allocate(schema)
    for name, (_, words) in arrays.items():
        weights.words(name)[:] = words
    return weights


def same_bits(a: HostWeights, b: HostWeights) -> bool:
    return all(np.array_equal(a.words_at(i), b.words_at(i)) for i in range(len(a.schema)))


def digest_of(weights: HostWeights) -> str:
    return DigestState.of(weights, threads=1).version_digest()


class Slow:
    """A plain WeightReader over HostWeights: reads are fresh copies, as from a file."""

    def __init__(self, weights: HostWeights) -> None:
        self._weights = weights
        self.reads: list[tuple[str, int, int]] = []

    @property
    def schema(self) -> Schema:
        return self._weights.schema

    def read(self, name: str, start: int, stop: int) -> Any:
        self.reads.append((name, start, stop))
        return self._weights.read(name, start, stop).copy()
