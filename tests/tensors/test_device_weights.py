"""Weights held as torch tensors: their words where they are, and copies on the host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stitch.errors import SchemaMismatchError, UsageError
from stitch.tensors import HostWeights, read_all
from stitch.tensors.device import DeviceWeights, host_bits, host_words
from stitch.tensors.reader import word_dtype
from stitch.tensors.torch_state import BITS, DTYPE_NAMES, copy_words, spec_of
from stitch.types import Schema, TensorSpec


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: t[1:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 7, -1),
    "empty": lambda t: t[:0],
    "offset": lambda t: t.view(-1, 4)[1:],
}


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_of_any_tensor_are_those_of_a_copy_to_the_host(
    dtype: torch.dtype, layout: str
) -> None:
    tensor = LAYOUTS[layout](random_bits(dtype, 4, 6, 4))
    spec = spec_of("t", tensor)
    wanted = np.empty(spec.num_words, word_dtype(spec))
    copy_words(spec, tensor, wanted)
    weights = DeviceWeights.of({"t": tensor})
    assert weights.schema == Schema.of([spec])
    words = weights.device_words("t", 0, spec.num_words)
    assert (words.dtype, words.dim()) == (BITS[spec.word_bytes], 1)
    read = read_all(weights, "t")
    assert read.dtype == wanted.dtype
    assert read.tolist() == wanted.tolist()


def test_contiguous_tensors_are_not_copied() -> None:
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.bool)}
    weights = DeviceWeights.of(tensors)
    tensors["a"][1, 1] = -0.0
    tensors["b"].fill_(True)
    assert np.flatnonzero(read_all(weights, "a")).tolist() == [6]
    assert read_all(weights, "b").tolist() == [1]
    pointer = weights.device_words("a", 0, 15).data_ptr()
    assert pointer == tensors["a"].data_ptr()


def test_a_schema_of_another_dtype_rounds() -> None:
    tensor = torch.randn(50)
    schema = Schema.of([TensorSpec.of("t", "BF16", (50,))])
    weights = DeviceWeights.of({"t": tensor.requires_grad_()}, schema)
    expected = tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert read_all(weights, "t").tolist() == expected.tolist()


def test_modules_numpy_arrays_and_pairs_are_taken() -> None:
    module = torch.nn.Linear(3, 2)
    assert DeviceWeights.of(module).schema.index.keys() == {"weight", "bias"}
    arrays = DeviceWeights.of([("x", np.arange(6, dtype=">i4").reshape(2, 3).T)])
    assert read_all(arrays, "x").tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(SchemaMismatchError, match="missing"):
        DeviceWeights.of({}, arrays.schema)


def test_load_copies_a_reader() -> None:
    schema = Schema.of(
        [
            TensorSpec.of("a", "BF16", (7,)),
            TensorSpec.of("b", "F64", (2, 2)),
            TensorSpec.of("c", "U8", (0,)),
            TensorSpec("d", "X3", (5,), 6),
        ]
    )
    host = HostWeights.allocate(schema)
    for index in range(len(schema)):
        host.words_at(index)[:] = 200 + index
    weights = DeviceWeights.load(host, "cpu")
    for spec in schema.tensors:
        assert read_all(weights, spec.name).tolist() == host.words(spec.name).tolist()
    host.words("a")[:] = 0
    assert read_all(weights, "a").tolist() == [200] * 7
    copy = HostWeights.load(weights)
    assert copy.words("d").tolist() == [203] * 6


def test_reads_are_read_only_and_checked() -> None:
    weights = DeviceWeights.of({"t": torch.arange(9, dtype=torch.int16)})
    assert weights.read("t", 2, 4).tolist() == [2, 3]
    with pytest.raises(ValueError, match="read-only"):
        weights.read("t", 0, 2)[0] = 1
    for call in (weights.read, weights.device_words):
        with pytest.raises(SchemaMismatchError, match="no tensor"):
            call("u", 0, 1)
        with pytest.raises(UsageError, match="asked for"):
            call("t", 4, 10)


def test_adopted_words_must_fit_the_schema() -> None:
    schema = Schema.of([TensorSpec.of("t", "BF16", (4,))])
    with pytest.raises(SchemaMismatchError, match="0 tensors need"):
        DeviceWeights(Schema.of([]), [torch.zeros(4, dtype=torch.int16)])
    for wrong in (
        torch.zeros(3, dtype=torch.int16),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int16),
        torch.zeros(4, dtype=torch.bfloat16),
    ):
        with pytest.raises(SchemaMismatchError, match="needs words"):
            DeviceWeights(schema, [wrong])


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_host_words_and_bits_are_two_names_of_one_memory(word_bytes: int) -> None:
    words = np.arange(5, dtype=f"<u{word_bytes}")
    bits = host_bits(words)
    assert bits.dtype == BITS[word_bytes]
    back = host_words(bits)
    assert back.dtype == words.dtype
    assert np.shares_memory(back, words)
    assert host_words(bits[::2]).tolist() == [0, 2, 4]
