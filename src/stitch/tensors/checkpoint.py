"""Checkpoints: one safetensors file, or a Hugging Face directory, single or sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from stitch.errors import CorruptCheckpointError, UsageError
from stitch.tensors.reader import Words, spec_for
from stitch.tensors.safetensors_file import SafetensorsFile
from stitch.tensors.shard_index import INDEX_NAME, SINGLE_NAME, read_shard_index
from stitch.types import BLOB_NAME, Schema

MAX_ASSET_BYTES = 64 << 20
"""Larger files of a checkpoint directory are not taken along with its weights."""

_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".gguf", ".h5", ".msgpack"}
    | {".onnx", ".npz", ".npy", ".ot"}
)


class Checkpoint:
    """A WeightReader over the files of one checkpoint. Close it, or use it as a context manager."""

    def __init__(self, path: Path, shards: list[SafetensorsFile], homes: Mapping[str, int]) -> None:
        """`homes` maps each tensor name to the index of the shard that holds it."""
        self.path = path
        self._shards = shards
        self._homes = homes
        self._schema = Schema.of(spec for shard in shards for spec in shard.schema.tensors)

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, in index order."""
        return tuple(shard.path for shard in self._shards)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free-form metadata of the first file."""
        return self._shards[0].metadata if self._shards else {}

    def read(self, name: str, start: int, stop: int) -> Words:
        """A fresh array of words [start, stop)."""
        spec_for(self._schema, name, start, stop)
        return self._shards[self._homes[name]].read(name, start, stop)

    def place_of(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor, and the byte in it of the tensor's first word."""
        spec_for(self._schema, name, 0, 0)
        shard = self._shards[self._homes[name]]
        return shard.path, shard.offset_of(name)

    def assets(self) -> tuple[Path, ...]:
        """Small files beside the weights (configuration, tokenizer ...), sorted by name.

        Weight files in any format, shard indexes, hidden files, files over MAX_ASSET_BYTES and
        names that cannot be blob names are left out. A checkpoint that is one file has none.
        """
        if not self.path.is_dir():
            return ()
        return tuple(sorted(path for path in self.path.iterdir() if _is_asset(path)))

    def close(self) -> None:
        """Release the files; later reads raise UsageError. Closing twice is harmless."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors file, a checkpoint directory or a shard index, checking every header.

    The format is what the name declares; contents are never sniffed. In a directory
    `model.safetensors` comes before `model.safetensors.index.json`, as transformers has it. Raises
    UsageError if there is no checkpoint at `path`, CorruptCheckpointError if it is malformed.
    """
    path = Path(path)
    try:
        if path.name == INDEX_NAME and path.is_file():
            return _open_files(path.parent, read_shard_index(path))
        if path.is_dir():
            return _open_directory(path)
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error}") from error
    if path.suffix != ".safetensors":
        raise UsageError(f"{path} is neither a .safetensors file nor a directory")
    shard = SafetensorsFile(path)
    return Checkpoint(path, [shard], dict.fromkeys(shard.schema.index, 0))


def _open_directory(path: Path) -> Checkpoint:
    if (path / SINGLE_NAME).exists():
        return _open_files(path, {SINGLE_NAME: None})
    if (path / INDEX_NAME).exists():
        return _open_files(path, read_shard_index(path / INDEX_NAME))
    raise UsageError(_describe_lack(path))


def _open_files(directory: Path, wanted: Mapping[str, frozenset[str] | None]) -> Checkpoint:
    """Open each file name and check that it holds exactly the wanted tensors (None: any)."""
    shards: list[SafetensorsFile] = []
    homes: dict[str, int] = {}
    try:
        for number, (file_name, names) in enumerate(wanted.items()):
            shard = _open_shard(directory / file_name)
            shards.append(shard)
            if names is not None:
                _check_names(shard, names)
            homes.update(dict.fromkeys(shard.schema.index, number))
        return Checkpoint(directory, shards, homes)
    except BaseException:
        for shard in shards:
            shard.close()
        raise


def _open_shard(path: Path) -> SafetensorsFile:
    if not path.exists():
        raise CorruptCheckpointError(f"{path.parent / INDEX_NAME} names {path.name}: it is missing")
    return SafetensorsFile(path)


def _check_names(shard: SafetensorsFile, names: frozenset[str]) -> None:
    held = shard.schema.index.keys()
    missing, extra = sorted(names - held), sorted(held - names)
    if missing or extra:
        raise CorruptCheckpointError(
            f"{shard.path} does not hold the tensors that the index gives it: "
            f"{len(missing)} missing {missing[:5]}, {len(extra)} not in the index {extra[:5]}"
        )


def _is_asset(path: Path) -> bool:
    return (
        BLOB_NAME.fullmatch(path.name) is not None
        and path.suffix.lower() not in _WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.is_file()
        and path.stat().st_size <= MAX_ASSET_BYTES
    )


def _describe_lack(directory: Path) -> str:
    others = sorted(p.name for p in directory.iterdir() if p.suffix.lower() in _WEIGHT_SUFFIXES)
    hint = f"; it has {', '.join(others[:5])}: convert or name the file" if others else ""
    return f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}"
