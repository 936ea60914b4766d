"""Patched copies of weight files. The original is never written: an engine may have it mapped."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.codec import TensorUpdate, UpdateSet
from stitch.errors import EngineError, UsageError
from stitch.failpoints import reach
from stitch.tensors import Checkpoint
from stitch.tensors.reader import Words, word_dtype
from stitch.types import TensorSpec

_FULL_COPY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """What changes in one tensor, whose first word is at byte `offset` of its file."""

    spec: TensorSpec
    offset: int
    updates: Sequence[TensorUpdate]


def copy_file(source: Path, target: Path) -> None:
    """A new file with the same bytes, durable; without copying where the file system can share.

    Raises OSError; `target` must not exist.
    """
    with source.open("rb") as old, target.open("xb") as new:
        _copy(old.fileno(), new.fileno())
        os.fsync(new.fileno())


def write_patched(source: Path, target: Path, changes: Sequence[TensorChange]) -> None:
    """A new file, durable: `source` with `changes`, whose old words must be what it holds.

    Raises EngineError that names the tensor, and OSError; then `target` is to be thrown away.
    """
    with source.open("rb") as old, target.open("x+b") as new:
        _copy(old.fileno(), new.fileno())
        # Not closed by hand: that fails while an error on its way up still holds views of it.
        mapped = mmap.mmap(new.fileno(), 0)
        for change in changes:
            _write(mapped, change)
        mapped.flush()
        os.fsync(new.fileno())
    reach("reload.patched")


def link_file(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where that cannot be had. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        copy_file(source, target)


def _copy(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, target, min(_FULL_COPY_BYTES, size - done))
        except OSError:  # not on every pair of file systems
            count = 0
        if not count:
            break
        done += count
    if done < size:
        os.lseek(source, done, os.SEEK_SET)
        os.lseek(target, done, os.SEEK_SET)
        with (
            open(source, "rb", closefd=False) as old,
            open(target, "wb", closefd=False, buffering=0) as new,
        ):
            shutil.copyfileobj(old, new, 16 << 20)


def _write(mapped: mmap.mmap, change: TensorChange) -> None:
    """Change one tensor in a mapped file."""
    spec = change.spec
    data = np.frombuffer(mapped, np.uint8, spec.num_bytes, change.offset)
    # Words that lie askew are changed in a copy: compiled loops want them aligned.
    askew = bool((data.ctypes.data if data.size else 0) % spec.word_bytes)
    words: Words = (data.copy() if askew else data).view(word_dtype(spec))
    for update in change.updates:
        _apply(spec, words, update)
    if askew:
        data[:] = words.view(np.uint8)


def _apply(spec: TensorSpec, words: Words, update: TensorUpdate) -> None:
    if not update.new.size:
        return
    try:
        update.check_target(words)
    except UsageError as error:
        raise EngineError(f"tensor {spec.name}: {error}") from error
    if update.positions is None:
        held = words[update.start : update.stop]
    else:
        held = words[update.positions]
    if not np.array_equal(held, update.old):
        raise EngineError(f"tensor {spec.name}: the stage's old bits are not the ones served")
    update.write(words, update.new)


def changes_by_file(checkpoint: Checkpoint, update: UpdateSet) -> Mapping[Path, list[TensorChange]]:
    """The changes of each file; EngineError for tensors that there are not."""
    tensors = checkpoint.schema.tensors
    by_tensor: dict[int, list[int]] = {}
    for number, item in enumerate(update.updates):
        if not 0 <= item.tensor < len(tensors):
            raise EngineError(f"the stage names tensor {item.tensor}, there are {len(tensors)}")
        _check_fits(tensors[item.tensor], item)
        by_tensor.setdefault(item.tensor, []).append(number)
    files: dict[Path, list[TensorChange]] = {}
    for tensor, numbers in by_tensor.items():
        spec = tensors[tensor]
        path, offset = checkpoint.place_of(spec.name)
        updates = [update.updates[number] for number in numbers]
        change = TensorChange(spec=spec, offset=offset, updates=updates)
        files.setdefault(path, []).append(change)
    return files


def _check_fits(spec: TensorSpec, update: TensorUpdate) -> None:
    if update.new.dtype != word_dtype(spec) or (
        update.new.size and not 0 <= update.first <= update.last < spec.num_words
    ):
        raise EngineError(
            f"the stage writes {update.new.dtype} words up to {update.last} of tensor {spec}, "
            f"which has {spec.num_words} of {spec.word_bytes} bytes"
        )
