"""Learning by digits: values that name elements are loaded for real, and read where they end.

Every element gets a number, written with digits that all weight dtypes hold exactly; each pass
feeds one digit of every number. It follows any path that keeps values: repacking after the load,
copies that are computed from weights, casts. One more pass with a check digit tells numbers from
values that came from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stitch.engines.placement.blocks import Block, UnmappableError
from stitch.engines.placement.compress import compress
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.record import Weights, source_tensor
from stitch.tensors.torch_state import DTYPE_NAMES
from stitch.types import Schema, TensorSpec

BASE = 251
"""Prime. Digits 1 to 251 are whole numbers that BF16 holds."""
BASE_NARROW = 113
"""For FP8 tensors, whose bytes 1 to 113 are digits: none is a NaN in any of the formats."""
_CHECK = 7919

Run = Callable[[Weights], Iterable[tuple[str, torch.Tensor]]]
"""Loads weights somewhere and gives (storage key, flat tensor) of everything that was reached."""


@dataclass(eq=False)
class Learned:
    """blocks: name -> where its elements were found. lost: name -> why they cannot be followed."""

    blocks: dict[str, list[Block]]
    lost: dict[str, str]


def learn_digits(schema: Schema, names: Iterable[str], live: LiveTensors, run: Run) -> Learned:
    """Run `run` once per digit with numbers in the tensors `names`, and ones in all others.

    Keys that are not in `live`, or of another size there, are ignored: a second model may hold
    more than the first.
    """
    wanted = [schema[name] for name in sorted(set(names))]
    base = BASE_NARROW if any(spec.word_bytes == 1 for spec in wanted) else BASE
    firsts = np.cumsum([0, *(spec.num_words for spec in wanted)])
    total = int(firsts[-1])
    passes = max(1, math.ceil(math.log(max(2, total), base)))
    numbers: dict[str, torch.Tensor] = {}
    valid: dict[str, torch.Tensor] = {}
    for step in range(passes + 1):
        numbering = _Numbering(wanted, firsts, base, None if step == passes else base**step)
        for key, flat in run(numbering.weights(schema)):
            if key not in live.storages or live[key].flat.numel() != flat.numel():
                continue
            digits, good = _digits(flat, base)
            if step == 0:
                numbers[key], valid[key] = torch.zeros_like(digits), torch.ones_like(good)
            if key not in numbers:
                continue
            valid[key] &= good
            if step < passes:
                numbers[key] += digits * base**step
            else:
                valid[key] &= digits == (numbers[key] * _CHECK + 1) % base
    return _placed(wanted, firsts, numbers, valid, live)


class _Numbering:
    """Gives every element of the wanted tensors one digit (or, without `unit`, a check digit)."""

    def __init__(
        self, wanted: list[TensorSpec], firsts: np.ndarray, base: int, unit: int | None
    ) -> None:
        self._first = {spec.name: int(at) for spec, at in zip(wanted, firsts, strict=False)}
        self._base = base
        self._unit = unit

    def weights(self, schema: Schema) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in schema.tensors:
            tensor = source_tensor(spec)
            if spec.name in self._first:
                self._write(spec, tensor.view(-1))
            else:
                _neutral(tensor)
            yield spec.name, tensor

    def _write(self, spec: TensorSpec, flat: torch.Tensor) -> None:
        first, step = self._first[spec.name], 1 << 22
        for at in range(0, flat.numel(), step):
            part = flat[at : at + step]
            number = torch.arange(first + at, first + at + part.numel())
            if self._unit is None:
                digit = (number * _CHECK + 1) % self._base
            else:
                digit = number // self._unit % self._base
            if part.element_size() == 1:
                part.view(torch.uint8).copy_(digit + 1)
            else:
                part.copy_(digit + 1)


def _neutral(tensor: torch.Tensor) -> None:
    """Ones, where scales must not be zero: no number has the digits and the check digit of ones."""
    if tensor.element_size() > 1:
        tensor.fill_(1)
    else:
        tensor.view(torch.uint8).zero_()


def _digits(flat: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) int64 digits on the CPU, and where they are digits at all."""
    if flat.element_size() == 1:
        values = flat.view(torch.uint8).cpu().long()
        return values - 1, (values > 0) & (values <= base)
    if flat.is_floating_point():
        floats = flat.detach().cpu().double()
        good = (floats >= 1) & (floats <= base) & (floats == floats.round())
        return torch.where(good, floats, 1.0).long() - 1, good
    values = flat.detach().cpu().long()
    good = (values >= 1) & (values <= base)
    return torch.where(good, values, 1) - 1, good


def _placed(
    wanted: list[TensorSpec],
    firsts: np.ndarray,
    numbers: Mapping[str, torch.Tensor],
    valid: Mapping[str, torch.Tensor],
    live: LiveTensors,
) -> Learned:
    learned = Learned({}, {})
    for key, number in numbers.items():
        where = valid[key] & (number < int(firsts[-1]))
        places = where.nonzero().view(-1).numpy()
        held = number.numpy()[places]
        owner = np.searchsorted(firsts, held, "right") - 1
        for at in np.unique(owner).tolist():
            spec, mine = wanted[at], owner == at
            try:
                widen = _widens(spec, live[key].dtype)
                found = compress(key, places[mine], held[mine] - firsts[at], widen=widen)
            except UnmappableError as error:
                learned.lost[spec.name] = str(error)
            else:
                learned.blocks.setdefault(spec.name, []).extend(found)
    for name in learned.lost:
        learned.blocks.pop(name, None)
    return learned


def _widens(spec: TensorSpec, dtype: str) -> bool:
    """Whether live words are wider; UnmappableError if they cannot hold the tensor's."""
    if (spec.dtype, dtype) == ("BF16", "F32"):
        return True
    sizes = {name: size.itemsize for size, name in DTYPE_NAMES.items()}
    same = spec.dtype == dtype or (spec.word_bytes == 1 and sizes.get(dtype) == 1)
    if not same:
        raise UnmappableError(f"the engine keeps it as {dtype}, which does not hold {spec.dtype}")
    return False
