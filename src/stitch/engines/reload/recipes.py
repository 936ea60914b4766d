"""How an engine's parameters are put together from checkpoint tensors, guessed and then proven.

An engine reports a SHA-256 of each parameter's bytes. A recipe says which bytes these are: parts of
checkpoint tensors, one after the other. Recipes are guessed from names (fused projections, stacked
experts, shards of tensor parallelism, padded vocabularies); one is believed only when it gives the
checksum that the engine reports for weights that are known.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch.tensors.reader import WeightReader, read_all
from stitch.types import Schema, TensorSpec

_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERTS = re.compile(r"(?P<before>.*\.experts)\.(?P<kind>w13|w2)_weight")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_PADDINGS = (1, 64)
"""Vocabularies are padded to multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part `index` of `count` of a tensor along `axis`, which is padded with zeros to `length`."""

    name: str
    axis: int = 0
    index: int = 0
    count: int = 1
    length: int


Recipe = tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of one rank. `rank` of `ranks`: which shard of tensor parallelism it is in.

    `place` tells apart ranks that are in the same shard."""

    place: str = ""
    name: str
    rank: int
    ranks: int


def digest_of(recipe: Recipe, reader: WeightReader) -> str:
    """SHA-256 (64 hex digits) of the bytes that a recipe gives."""
    total = hashlib.sha256()
    for part in recipe:
        spec = reader.schema[part.name]
        words = read_all(reader, part.name).reshape(spec.shape or (1,))
        lacking = part.length - words.shape[part.axis]
        if lacking > 0:
            widths = [(0, lacking if axis == part.axis else 0) for axis in range(words.ndim)]
            words = np.pad(words, widths)
        step = part.length // part.count
        span = slice(part.index * step, (part.index + 1) * step)
        cut = words[span] if part.axis == 0 else words[:, span]
        total.update(np.ascontiguousarray(cut).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


class Guesses:
    """What parameters may be made of, for one checkpoint."""

    def __init__(self, schema: Schema, *, kv_heads: int | None = None) -> None:
        self._schema = schema
        self._kv_heads = kv_heads

    def sources(self, parameter: Parameter) -> tuple[str, ...]:
        """The checkpoint tensors that a parameter is made of, by its name; empty if not known."""
        for name in _spellings(parameter.name):
            for found in self._named(name):
                if all(source in self._schema for source in found):
                    return found
        return ()

    def recipes(self, parameter: Parameter) -> Iterator[Recipe]:
        """The likeliest first. None for tensors that are empty, or several elements to a word."""
        sources = [self._schema[name] for name in self.sources(parameter)]
        if not sources or any(not 0 < math.prod(s.shape) == s.num_words for s in sources):
            return
        ranks = parameter.ranks
        for axis in (0, 1) if ranks > 1 else (0,):
            if all(len(spec.shape) > axis for spec in sources):
                parts = [self._shard(spec, axis, parameter) for spec in sources]
                if all(part is not None for part in parts):
                    yield tuple(part for part in parts if part is not None)
        yield tuple(Part(name=spec.name, length=_rows(spec)) for spec in sources)
        if len(sources) == 1:
            yield from self._padded(sources[0], parameter)

    def _named(self, name: str) -> Iterator[tuple[str, ...]]:
        """Lists of tensors that a parameter of this name may be made of."""
        yield (name,)
        for fused, parts in _FUSED.items():
            if f".{fused}." in name:
                yield tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        found = _EXPERTS.fullmatch(name)
        if found is not None:
            kinds = ("gate_proj", "up_proj") if found["kind"] == "w13" else ("down_proj",)
            number = 0
            names: list[str] = []
            while f"{found['before']}.{number}.{kinds[0]}.weight" in self._schema:
                names += [f"{found['before']}.{number}.{kind}.weight" for kind in kinds]
                number += 1
            if names:
                yield tuple(names)

    def _shard(self, spec: TensorSpec, axis: int, parameter: Parameter) -> Part | None:
        """One rank's shard; of keys and values some ranks have the same one."""
        count, index = parameter.ranks, parameter.rank
        heads = self._kv_heads
        if heads and heads < count and any(f".{kind}." in spec.name for kind in _KEYS_AND_VALUES):
            index, count = index * heads // count, heads
        if spec.shape[axis] % count:
            return None
        return Part(name=spec.name, axis=axis, index=index, count=count, length=spec.shape[axis])

    def _padded(self, spec: TensorSpec, parameter: Parameter) -> Iterator[Recipe]:
        rows, ranks = _rows(spec), parameter.ranks
        for padding in _PADDINGS:
            for step in {padding, padding * ranks}:
                length = -(-rows // step) * step
                if length > rows and not length % ranks:
                    yield (Part(name=spec.name, index=parameter.rank, count=ranks, length=length),)


def kv_heads_of(directory: Path) -> int | None:
    """From a checkpoint's configuration; None if it says nothing of them."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        found = part.get("num_key_value_heads") if isinstance(part, dict) else None
        if isinstance(found, int) and found > 0:
            return found
    return None


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _spellings(name: str) -> Sequence[str]:
    """Names under which a checkpoint may have an engine's parameter."""
    bare = name.removeprefix("model.")
    return (name, f"model.{name}", bare)
