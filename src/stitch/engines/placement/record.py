"""Learning a placement from one run of the engine's loader, in which nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stitch.engines.placement.blocks import Block
from stitch.engines.placement.live import (
    LiveTensors,
    ModuleGuard,
    StandIns,
    attribute_tensors,
    fingerprint,
    is_plain,
    storage_id,
)
from stitch.engines.placement.sandbox import Fill, Sandbox, Write
from stitch.errors import FatalReplicaError
from stitch.tensors.reader import WeightReader, read_all
from stitch.tensors.torch_state import BITS, TORCH_DTYPES
from stitch.types import Schema, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Weights], object]

SMALL_WORDS = 1024
"""Tensors up to this size are given with their real values: loaders compute with scales."""


@dataclass(eq=False)
class Recording:
    """What the loader would have written.

    blocks: name -> where its elements go. lost: name -> why some of its values cannot be followed.
    derived: path -> (tensor outside parameters and buffers, names that it is computed from).
    notes: constant fills and other writes that concern no checkpoint value.
    """

    blocks: dict[str, list[Block]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    derived: dict[str, tuple[torch.Tensor, frozenset[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def record(
    model: torch.nn.Module, live: LiveTensors, load: Load, schema: Schema, reader: WeightReader
) -> Recording:
    """Run `load` once with all its writes caught; the model's weights and attributes stay.

    Raises FatalReplicaError if memory of the model changed all the same.
    """
    attributes = attribute_tensors(model, live)
    before = _fingerprints(live, attributes)
    guard = ModuleGuard(model)
    stand_ins = StandIns(live)
    with stand_ins:
        box = Sandbox(live, stand_ins.flats)
        try:
            with box.running():
                load(_sources(schema, reader, box))
        finally:
            changed = guard.restore()
    after = _fingerprints(live, attributes)
    if after != before:
        wrong = sorted(key for key in before if before[key] != after[key])
        raise FatalReplicaError(
            f"the loader wrote to live memory although its writes were caught: {wrong[:5]}"
        )
    return _Reading(live, attributes, box, schema).result(stand_ins.rebound, changed)


def source_tensor(spec: TensorSpec) -> torch.Tensor:
    """A tensor as a checkpoint would give it, its memory untouched."""
    dtype = TORCH_DTYPES.get(spec.dtype)
    if dtype is None:
        return torch.empty(spec.num_bytes, dtype=torch.uint8)
    shape = list(spec.shape)
    if spec.dtype == "F4":
        shape[-1] //= 2
    return torch.empty(shape, dtype=dtype)


def _sources(schema: Schema, reader: WeightReader, box: Sandbox) -> Iterator[tuple[str, Any]]:
    for spec in schema.tensors:
        tensor = source_tensor(spec)
        if spec.num_words <= SMALL_WORDS:
            words = np.array(read_all(reader, spec.name))
            real = torch.from_numpy(
                words.view(f"i{spec.word_bytes}" if spec.word_bytes > 1 else "u1")
            )
            tensor.view(-1).view(BITS[spec.word_bytes]).copy_(real)
        yield spec.name, box.source(spec.name, tensor)


def _fingerprints(live: LiveTensors, attributes: dict[str, torch.Tensor]) -> dict[str, int]:
    sums = live.sums()
    for path, tensor in attributes.items():
        if tensor.is_contiguous():
            sums[path] = fingerprint(tensor.detach().reshape(-1))
    return sums


class _Reading:
    """Makes a Recording of a sandbox's notes."""

    def __init__(
        self,
        live: LiveTensors,
        attributes: dict[str, torch.Tensor],
        box: Sandbox,
        schema: Schema,
    ) -> None:
        self._live = live
        self._paths = {storage_id(tensor): path for path, tensor in attributes.items()}
        self._box = box
        self._schema = schema
        self._out = Recording()
        self._into: dict[str, set[str]] = {}
        """Live storage -> names that have blocks in it."""

    def result(
        self, rebound: list[tuple[str, torch.Tensor]], changed: dict[str, tuple[Any, Any]]
    ) -> Recording:
        out, notes = self._out, self._box.notes
        for name, block in notes.blocks:
            kept = out.blocks.setdefault(name, [])
            if block not in kept:
                kept.append(block)
            self._into.setdefault(block.key, set()).add(name)
        for write in notes.writes:
            self._write(write)
        for key, tensor in rebound:
            self._lose(self._names(self._box.origins(tensor)), f"the loader replaces {key}")
        for path, (old, new) in changed.items():
            self._attribute(path, old, new)
        self._fills(notes.fills, notes.blocks)
        for name in sorted(notes.read):
            if name not in out.blocks:
                out.lost.setdefault(name, "the loader reads its value into Python")
        return out

    def _names(self, origins: frozenset[tuple[str, str]]) -> frozenset[str]:
        names = {which for kind, which in origins if kind == "name"}
        for kind, which in origins:
            if kind == "key":
                names |= self._into.get(which, set())
        return frozenset(names)

    def _lose(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._out.lost.setdefault(name, reason)

    def _write(self, write: Write) -> None:
        origins = frozenset({("name", n) for n in write.names} | {("key", k) for k in write.keys})
        if write.key is not None:
            names = self._names(origins)
            if names:
                text = write.reason or f"{write.op} into {write.key} is more than a copy"
                self._lose(names, text)
            else:
                self._out.notes.append(f"{write.op} writes {write.key} from no checkpoint tensor")
        elif write.target is not None:
            self._derive(write.target, self._names(origins))

    def _derive(self, target: torch.Tensor, names: frozenset[str]) -> None:
        if not names:
            return
        path = self._paths.get(storage_id(target))
        if path is None or not is_plain(target):
            self._lose(names, "the loader writes it to memory that no module holds")
            return
        _, before = self._out.derived.get(path, (target, frozenset()))
        self._out.derived[path] = (target, before | names)

    def _attribute(self, path: str, old: Any, new: Any) -> None:
        """An attribute that the loader set anew."""
        if isinstance(new, torch.Tensor):
            names = self._names(self._box.origins(new))
            if not names:
                return
            if isinstance(old, torch.Tensor) and self._live.key_of(old) is None and is_plain(old):
                self._derive(old, names)
            else:
                self._lose(names, f"the loader makes {path} of it")

    def _fills(self, fills: list[Fill], blocks: list[tuple[str, Block]]) -> None:
        """Constants are padding, unless they overwrite what was copied before."""
        for fill in fills:
            it = fill.block
            for name, block in blocks[: fill.after]:
                apart = it.live_stop <= block.live or block.live_stop <= it.live
                if it.key == block.key and not apart and _meet(it, block):
                    self._lose([name], f"the loader overwrites a part of it in {block.key}")
        if fills:
            keys = sorted({fill.block.key for fill in fills})
            self._out.notes.append(f"padding is filled with constants in {', '.join(keys[:8])}")


def _meet(one: Block, other: Block) -> bool:
    """Whether two blocks share live words."""
    start, stop = max(one.live, other.live), min(one.live_stop, other.live_stop)
    taken = np.zeros(stop - start, bool)
    mine = one.offsets()
    taken[mine[(mine >= start) & (mine < stop)] - start] = True
    theirs = other.offsets()
    return bool(taken[theirs[(theirs >= start) & (theirs < stop)] - start].any())
