"""Checkpoints as the verbs read them: opened, shown in a view, digested."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stitch.cli.console import Console
from stitch.codec import DigestState
from stitch.errors import CorruptCheckpointError, SchemaMismatchError, UsageError
from stitch.tensors import Checkpoint, WeightReader, open_checkpoint
from stitch.tensors.durable import replacing_file
from stitch.types import Schema
from stitch.views import VIEWS, ViewReader

MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint and what is read of it."""

    checkpoint: Checkpoint
    reader: WeightReader


def add_view_flag(parser: argparse.ArgumentParser, default: str = "checkpoint") -> None:
    parser.add_argument(
        "--view",
        choices=VIEWS,
        default=default,
        help=f"what is read of the checkpoints: as stored, or as BF16 (default: {default})",
    )


@contextmanager
def opened(path: str | Path, view: str) -> Iterator[Opened]:
    """Open a safetensors file or checkpoint directory in a view."""
    with open_checkpoint(path) as checkpoint:
        yield Opened(checkpoint=checkpoint, reader=ViewReader(checkpoint, view))


def digest_of(
    reader: WeightReader, console: Console, what: str, threads: int | None = None
) -> DigestState:
    """The digest state of everything the reader shows, with a progress bar."""
    with console.progress(what) as progress:
        return DigestState.of(reader, progress=progress, threads=threads)


def check_same_tensors(ours: Schema, theirs: Schema, our_name: str, their_name: str) -> None:
    """Raise SchemaMismatchError that lists every kind of difference."""
    problems = schema_differences(ours, theirs)
    if problems:
        raise SchemaMismatchError(
            f"{our_name} and {their_name} have different tensors: {'; '.join(problems)}"
        )


def schema_differences(ours: Schema, theirs: Schema) -> list[str]:
    """What is only in one of the two, and what has another dtype or shape."""
    only_ours = [name for name in ours.index if name not in theirs]
    only_theirs = [name for name in theirs.index if name not in ours]
    changed = [
        f"{ours[name]} became {theirs[name].dtype}{list(theirs[name].shape)}"
        for name in ours.index
        if name in theirs and ours[name] != theirs[name]
    ]
    kinds = (
        ("only in the first", only_ours),
        ("only in the second", only_theirs),
        ("changed", changed),
    )
    return [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def refuse_overwriting(out: Path, *inputs: Path) -> None:
    """Raise UsageError if writing `out` would destroy an input."""
    for path in inputs:
        if out.exists() and path.exists() and os.path.samefile(out, path):
            raise UsageError(f"--out {out} is the input {path}")


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file durably; it appears complete or not at all."""
    with replacing_file(path) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]


def prove(out: Path, digest: str, console: Console, threads: int | None) -> None:
    """Read what was written at `out` and raise unless it has this version digest."""
    with opened(out, "checkpoint") as written:
        found = digest_of(written.reader, console, "proving", threads).version_digest()
    if found != digest:
        raise CorruptCheckpointError(
            f"{out} was written but reads back with digest {found} instead of {digest}: "
            "do not use it; the disk or its cache alters data"
        )
