"""Write weights as safetensors files and Hugging Face checkpoint directories, by streaming."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stitch.errors import SchemaMismatchError
from stitch.tensors.checkpoint import Checkpoint, open_checkpoint
from stitch.tensors.durable import check_replaceable, replacing_directory, replacing_file
from stitch.tensors.header import build_header, file_order
from stitch.tensors.reader import Progress, WeightReader, spans
from stitch.tensors.shard_index import INDEX_NAME, SINGLE_NAME, build_shard_index
from stitch.types import TensorSpec

DEFAULT_METADATA: Mapping[str, str] = {"format": "pt"}
"""What transformers wants to see before it loads a file."""


def write_safetensors(
    path: str | os.PathLike[str],
    reader: WeightReader,
    *,
    names: Iterable[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `names` (default: all) of the reader's tensors to one file, durably and atomically.

    `path` may be the file that the reader reads from. Equal content gives equal bytes. Memory is
    bounded by a few chunks. Raises what the reader raises, StoreFullError or UsageError; `path`
    then holds what it held before.
    """
    schema = reader.schema
    wanted = schema.index.keys() if names is None else set(names)
    if unknown := sorted(wanted - schema.index.keys()):
        raise SchemaMismatchError(f"cannot write tensors that the reader lacks: {unknown[:10]}")
    specs = file_order(schema[name] for name in wanted)
    with replacing_file(Path(path)) as file:
        _write_tensors(
            file, reader, specs, DEFAULT_METADATA if metadata is None else metadata, progress
        )


def write_checkpoint(
    directory: str | os.PathLike[str],
    reader: WeightReader,
    *,
    max_shard_bytes: int = 5_000_000_000,
    assets_from: str | os.PathLike[str] | Checkpoint | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a directory that transformers loads: `model.safetensors`, or shards with an index.

    Shards hold at most `max_shard_bytes` of tensor data unless one tensor is larger. The small
    files beside the weights of `assets_from` come along. The directory appears whole or not at all;
    one that exists and is not empty is replaced only with `overwrite` (it may be what `reader`
    reads from). Raises as `write_safetensors` does.
    """
    target = Path(directory)
    check_replaceable(target, overwrite=overwrite)
    shards = _plan_shards(reader.schema.tensors, max_shard_bytes)
    done = 0
    with replacing_directory(target, overwrite=overwrite) as folder:
        for file_name, names in shards.items():
            write_safetensors(
                folder / file_name,
                reader,
                names=names,
                progress=_shifted(progress, done, reader.schema.num_bytes),
            )
            done += sum(reader.schema[name].num_bytes for name in names)
        if len(shards) > 1:
            homes = {name: file_name for file_name, names in shards.items() for name in names}
            _write_bytes(folder / INDEX_NAME, build_shard_index(homes, reader.schema.num_bytes))
        for asset in _assets(assets_from):
            with asset.open("rb") as source, replacing_file(folder / asset.name) as file:
                shutil.copyfileobj(source, file)


def _write_tensors(
    file: BinaryIO,
    reader: WeightReader,
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    progress: Progress | None,
) -> None:
    _write_all(file, build_header(specs, metadata))
    done, total = 0, sum(spec.num_bytes for spec in specs)
    for spec in specs:
        for start, stop in spans(spec):
            words = reader.read(spec.name, start, stop)
            _write_all(file, words.view(np.uint8).data)
            done += (stop - start) * spec.word_bytes
            if progress is not None:
                progress(done, total)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take less than it was given."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _write_bytes(path: Path, data: bytes) -> None:
    with replacing_file(path) as file:
        _write_all(file, data)


def _plan_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> Mapping[str, Sequence[str]]:
    """File name -> tensor names, in schema order; a new shard where the next does not fit."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        if spec.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec.name)
        room -= spec.num_bytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards, start=1)}


def _assets(source: str | os.PathLike[str] | Checkpoint | None) -> Sequence[Path]:
    if source is None:
        return ()
    if isinstance(source, Checkpoint):
        return source.assets()
    with open_checkpoint(source) as checkpoint:
        return checkpoint.assets()


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Report one shard's progress as part of the whole checkpoint's."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)
