"""Our reader and writer against the safetensors library, and files that change under a reader."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from stitch.errors import CorruptCheckpointError, SchemaMismatchError, UsageError
from stitch.tensors import HostWeights, open_checkpoint, read_all, write_safetensors
from stitch.tensors.header import build_header
from stitch.tensors.torch_state import DTYPE_NAMES, copy_words, spec_of
from stitch.types import Schema, TensorSpec

SHAPES = [(), (0,), (2, 0), (0, 3), (1,), (3, 5), (2, 3, 4)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of every bit pattern alike, NaN payloads and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64)) * size
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_of(tensors: dict[str, torch.Tensor]) -> HostWeights:
    weights = HostWeights.allocate(Schema.of(spec_of(n, t) for n, t in tensors.items()))
    for spec in weights.schema.tensors:
        copy_words(spec, tensors[spec.name], weights.words(spec.name))
    return weights


def shapes_for(dtype: torch.dtype) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if shape or DTYPE_NAMES[dtype] != "F4"]


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_files_of_the_library_are_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{i}": random_bits(dtype, s, i) for i, s in enumerate(shapes_for(dtype))}
    path = tmp_path / "lib.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.schema == Schema.of(spec_of(n, t) for n, t in tensors.items())
        for name, tensor in tensors.items():
            assert read_all(checkpoint, name).tobytes() == bits_of(tensor)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_our_files_are_read_by_the_library_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{i}": random_bits(dtype, s, i) for i, s in enumerate(shapes_for(dtype))}
    path = tmp_path / "ours.safetensors"
    write_safetensors(path, weights_of(tensors))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert bits_of(got) == bits_of(tensor)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("F4", (2, 6), 6),
        ("F6_E2M3", (2, 4), 6),
        ("F6_E3M2", (4,), 3),
        ("F8_E8M0", (3,), 3),
        ("MYSTERY", (7, 7), 10),
    ],
)
def test_dtypes_without_a_torch_tensor_round_trip_as_bytes(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], num_bytes: int
) -> None:
    schema = Schema((TensorSpec("t", dtype, shape, num_bytes),))
    weights = HostWeights(schema, [np.arange(num_bytes, dtype=np.uint8)])
    write_safetensors(tmp_path / "t.safetensors", weights)
    with open_checkpoint(tmp_path / "t.safetensors") as checkpoint:
        assert checkpoint.schema == schema
        assert read_all(checkpoint, "t").tobytes() == bytes(range(num_bytes))


def test_mixed_dtypes_in_one_file_agree_with_the_library(tmp_path: Path) -> None:
    tensors = {
        DTYPE_NAMES[dtype]: random_bits(dtype, (3, 5), i) for i, dtype in enumerate(DTYPE_NAMES)
    }
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_safetensors(ours, weights_of(tensors))
    safetensors.torch.save_file(tensors, theirs)
    with open_checkpoint(ours) as a, open_checkpoint(theirs) as b:
        assert a.schema == b.schema
        for name in a.schema.index:
            assert read_all(a, name).tobytes() == read_all(b, name).tobytes()


def test_any_span_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", weights_of({"t": torch.arange(10)}))
    with open_checkpoint(tmp_path / "t.safetensors") as checkpoint:
        assert checkpoint.read("t", 3, 6).tolist() == [3, 4, 5]
        assert checkpoint.read("t", 10, 10).tolist() == []
        for start, stop in [(-1, 2), (3, 2), (0, 11)]:
            with pytest.raises(UsageError, match="has 10 words"):
                checkpoint.read("t", start, stop)
        with pytest.raises(SchemaMismatchError, match="'u'"):
            checkpoint.read("u", 0, 1)


def test_an_empty_file_has_an_empty_schema(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", weights_of({}))
    assert safetensors.torch.load_file(tmp_path / "t.safetensors") == {}
    with open_checkpoint(tmp_path / "t.safetensors") as checkpoint:
        assert len(checkpoint.schema) == 0


def test_a_tensor_of_more_than_2_31_elements_is_read_at_its_end(tmp_path: Path) -> None:
    num = 2**31 + 24
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(build_header([TensorSpec.of("t", "U8", [num])], {}))
        file.seek(num - 3, os.SEEK_CUR)
        file.write(b"xyz")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("t", num - 4, num).tobytes() == b"\0xyz"


def test_a_file_truncated_while_open_is_an_error_that_names_tensor_and_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of({"a": torch.zeros(1000), "b": torch.zeros(1000)}))
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(CorruptCheckpointError, match=r"t\.safetensors.*'b'.*truncated"):
            read_all(checkpoint, "b")


def test_a_file_rewritten_in_place_while_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of({"a": torch.zeros(1000)}))
    with open_checkpoint(path) as checkpoint:
        content = path.read_bytes()
        path.write_bytes(content[:-4] + b"abcd")
        os.utime(path, ns=(0, 0))
        with pytest.raises(CorruptCheckpointError, match="changed in place"):
            read_all(checkpoint, "a")


def test_a_file_replaced_while_open_still_reads_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of({"a": torch.zeros(10)}))
    with open_checkpoint(path) as checkpoint:
        write_safetensors(path, weights_of({"a": torch.ones(10)}))
        assert not read_all(checkpoint, "a").any()
    with open_checkpoint(path) as checkpoint:
        assert read_all(checkpoint, "a").all()


def test_reading_after_close_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, weights_of({"a": torch.zeros(10)}))
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(UsageError, match="was closed"):
        read_all(checkpoint, "a")


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", 5) + b"{{{{{")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(CorruptCheckpointError):
            open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        open_checkpoint(path)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        open_checkpoint(tmp_path / "none.safetensors")


def test_the_real_base_reads_as_the_library_reads_it(real_data: Path) -> None:
    path = real_data / "base.safetensors"
    expected = safetensors.torch.load_file(path)
    with open_checkpoint(path) as checkpoint:
        weights = HostWeights.load(checkpoint)
    assert weights.schema.index.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights.words(name).tobytes() == bits_of(tensor)


def test_many_tiny_tensors_open_and_load(tmp_path: Path) -> None:
    schema = Schema.of(TensorSpec.of(f"layer.{i:06}.w", "BF16", [3]) for i in range(20_000))
    weights = HostWeights.allocate(schema)
    for i in range(len(schema)):
        weights.words_at(i)[:] = i % 65536
    write_safetensors(tmp_path / "many.safetensors", weights)
    with open_checkpoint(tmp_path / "many.safetensors") as checkpoint:
        again = HostWeights.load(checkpoint)
    assert all((again.words_at(i) == i % 65536).all() for i in range(len(schema)))
