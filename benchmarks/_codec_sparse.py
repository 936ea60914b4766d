"""The sparse wires that others ship, written afresh from their published formats, at their best.

Neither loses to Python: loops are compiled, buffers are kept from step to step, compressors and
hashes release the interpreter, tensors are spread over the cores.

`index+value` (sparse patches of vLLM's loader, verl, TRL): for each tensor the flat positions as
int32 and the new words. No proof.

`grail` (sparse checkpoints of one-covenant/grail, format 3.1, "PULSE"): for each tensor row deltas
and column deltas, each array in the narrowest of u8 (rows only), u16 and int32 that holds it, and
the new words; one zstd frame of level 1 around everything. `grail` is the wire alone;
`grail+sha256` is what it ships: SHA-256 over names, dtypes, shapes and bytes of the whole new
state, made by the sender and checked by the receiver. The sender hashes beside its other work if
there is a second core.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks import _codec_loops as loops
from benchmarks._codec_data import Words, arrays
from benchmarks._codec_files import buffer, pack, to_json, unpack
from benchmarks._codec_wires import Files, Workers
from stitch.tensors import HostWeights
from stitch.types import Schema

Index = npt.NDArray[np.int32]


class Changes:
    """Finds changed positions and new words of a tensor, into buffers that are kept."""

    def __init__(self, weights: HostWeights) -> None:
        # Only the pages that are written ever take memory.
        sizes = [spec.num_words + 1 for spec in weights.schema.tensors]
        self._index = [np.empty(size, np.int32) for size in sizes]
        self._value = [np.empty(size, np.uint16) for size in sizes]

    def find(self, tensor: int, old: Words, new: Words) -> tuple[Index, Words]:
        """Ascending positions (k,) and new words (k,); views into the buffers."""
        index, value = self._index[tensor], self._value[tensor]
        whole = old.size - old.size % 32
        rows = (words[:whole].view(np.uint64).reshape(-1, 8) for words in (old, new))
        count = loops.find_and_gather()(*rows, index, value)
        rest = np.flatnonzero(old[whole:] != new[whole:]) + whole
        end = count + rest.size
        index[count:end] = rest
        value[count:end] = new[rest]
        return index[:end], value[:end]


class IndexValue:
    name = "index+value"

    def __init__(self, weights: HostWeights, workers: Workers) -> None:
        self._changes, self._workers = Changes(weights), workers

    def encode(self, old: HostWeights, new: HostWeights) -> Files:
        before, after = arrays(old), arrays(new)

        def work(tensor: int) -> tuple[Index, Words]:
            return self._changes.find(tensor, before[tensor], after[tensor])

        header: dict[str, list[int]] = {}
        data: list[memoryview] = []
        offset = 0
        found = self._workers.map(work, range(len(before)))
        for spec, (index, value) in zip(old.schema.tensors, found, strict=True):
            if index.size:
                header[spec.name] = [offset, index.size]
                data += [buffer(index), buffer(value)]
                offset += index.nbytes + value.nbytes
        return [pack(header, data)]

    def apply(self, files: Files, weights: HostWeights) -> None:
        header, data = unpack(files[0])
        schema = weights.schema

        def work(tensor: int) -> None:
            offset, count = header[schema.tensors[tensor].name]
            index = np.frombuffer(data, np.int32, count, offset)
            value = np.frombuffer(data, np.uint16, count, offset + 4 * count)
            if not loops.scatter()(index, value, weights.words_at(tensor)):
                raise ValueError(f"a position is outside tensor {schema.tensors[tensor]}")

        self._workers.map(work, [schema.index[name] for name in header])


class Grail:
    def __init__(self, weights: HostWeights, workers: Workers, *, proof: bool) -> None:
        self.name = "grail+sha256" if proof else "grail"
        self._changes, self._workers, self._proof = Changes(weights), workers, proof
        threads = workers.cores if workers.cores > 1 else 0
        self._compressor = zstandard.ZstdCompressor(level=1, threads=threads)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: HostWeights, new: HostWeights) -> Files:
        before, after = arrays(old), arrays(new)
        digest = self._workers.beside(lambda: _state_sha256(new)) if self._proof else None

        def work(tensor: int) -> list[npt.NDArray[Any]]:
            index, value = self._changes.find(tensor, before[tensor], after[tensor])
            if not index.size:
                return []
            return [*_row_deltas(index, _columns(old.schema, tensor)), value]

        header: list[dict[str, Any]] = []
        data: list[memoryview] = []
        offset = 0
        found = self._workers.map(work, range(len(before)))
        for spec, three in zip(old.schema.tensors, found, strict=True):
            if not three:
                continue
            ends = np.cumsum([array.nbytes for array in three]) + offset
            row = {
                "name": spec.name,
                "shape": spec.shape,
                "num_nonzero": three[0].size,
                "value_dtype": "bfloat16",
                "row_dtype": three[0].dtype.name,
                "col_dtype": three[1].dtype.name,
                "ends": ends.tolist(),
            }
            header.append(row)
            data += map(buffer, three)
            offset = int(ends[-1])
        frame = self._compressor.compress(pack({"version": 31, "tensors": header}, data))
        return [frame] if digest is None else [frame, to_json({"weights_hash": digest()})]

    def apply(self, files: Files, weights: HostWeights) -> None:
        header, data = unpack(self._decompressor.decompress(files[0]))
        schema = weights.schema
        rows = {schema.index[row["name"]]: row for row in header["tensors"]}

        def work(tensor: int) -> None:
            row = rows[tensor]
            count = row["num_nonzero"]
            dtypes = [np.dtype(row["row_dtype"]), np.dtype(row["col_dtype"]), np.dtype("<u2")]
            down, right, value = (
                np.frombuffer(data, dtype, count, end - count * dtype.itemsize)
                for dtype, end in zip(dtypes, row["ends"], strict=True)
            )
            right, down = (array.astype(np.int32, copy=False) for array in (right, down))
            columns, target = _columns(schema, tensor), weights.words_at(tensor)
            if not loops.scatter_rows()(down, right, columns, value, target):
                raise ValueError(f"a position is outside tensor {schema.tensors[tensor]}")

        self._workers.map(work, rows)
        if self._proof and json.loads(files[1])["weights_hash"] != _state_sha256(weights):
            raise ValueError("the weights' SHA-256 is not the stated one")


def _columns(schema: Schema, tensor: int) -> int:
    """Elements per row; a vector is a column."""
    spec = schema.tensors[tensor]
    return max(1, spec.num_words // spec.shape[0]) if spec.shape else 1


def _row_deltas(index: Index, columns: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rows, cols = np.empty_like(index), np.empty_like(index)
    most_rows, most_cols = loops.split_rows()(index, columns, rows, cols)
    row_dtype = np.uint8 if most_rows < 1 << 8 else np.uint16 if most_rows < 1 << 16 else np.int32
    col_dtype = np.uint16 if most_cols < 1 << 16 else np.int32
    return rows.astype(row_dtype, copy=False), cols.astype(col_dtype, copy=False)


def _state_sha256(weights: HostWeights) -> str:
    hasher = hashlib.sha256()
    for spec, words in zip(weights.schema.tensors, arrays(weights), strict=True):
        hasher.update(f"{spec.name}{spec.dtype}{spec.shape}".encode())
        hasher.update(buffer(words))
    return hasher.hexdigest()
