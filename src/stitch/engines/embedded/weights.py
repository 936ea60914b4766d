"""The live weights of a model: read by words, and changed in place with proof and undo.

Canonical names are the checkpoint's. Each maps to the storage that the model computes with; tied
names map to the same storage. Tensors are written through, never replaced: replacing one would
untie it and leave other references on the old values.

A model may compute in float32 with BF16 weights (CPUs without BF16 matrix products are several
times faster so). A BF16 value is the upper half of the equal float32 value, so the words of such a
tensor are the upper halves of its storage, and the lower halves are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stitch.codec import TensorUpdate, UpdateSet
from stitch.errors import EngineError, SchemaMismatchError, UsageError
from stitch.tensors import Words
from stitch.tensors.reader import spec_for, word_dtype
from stitch.tensors.torch_state import select, spec_of
from stitch.types import Schema, TensorSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Word bytes -> the torch dtype through which bits are moved untouched."""


@dataclass(frozen=True)
class Patch:
    """One tensor's change, on the model's device and ready to be written.

    `where` is a slice of the flat words, or their int64 positions.
    """

    name: str
    live: torch.Tensor
    where: slice | torch.Tensor
    new: torch.Tensor
    old: torch.Tensor

    def holds(self, values: torch.Tensor) -> bool:
        """Whether the live words are `values`."""
        return bool(torch.equal(self.live[self.where], values))

    def write(self, values: torch.Tensor) -> None:
        """Put `values` into the model."""
        with torch.no_grad():
            if isinstance(self.where, slice):
                self.live[self.where].copy_(values)
            else:
                self.live.index_put_((self.where,), values)


@dataclass(frozen=True)
class Change:
    """A staged update set: every patch was checked against the live words."""

    patches: tuple[Patch, ...]
    num_changed: int

    def apply(self) -> None:
        """Write the new words and read them back; EngineError names a tensor that did not take."""
        self._write([(patch, patch.new) for patch in self.patches])

    def undo(self) -> None:
        """Write the old words and read them back."""
        self._write([(patch, patch.old) for patch in self.patches])

    def _write(self, jobs: Sequence[tuple[Patch, torch.Tensor]]) -> None:
        for patch, values in jobs:
            patch.write(values)
        for patch, values in jobs:
            if not patch.holds(values):
                raise EngineError(f"tensor {patch.name}: the words read back are not those written")


class LiveWeights:
    """A model's tensors as words. A WeightReader; reads see what the next step would compute with.

    Whoever reads while a commit may run must hold commits off: nothing here locks.
    """

    def __init__(self, schema: Schema, words: Sequence[torch.Tensor]) -> None:
        """Adopt one flat integer tensor per schema tensor, each a view of live storage.

        A view with a step of two words is taken for the upper halves of float32 storage.
        """
        self._schema = schema
        self._words = list(words)
        self._ties = _ties(self._words)

    @classmethod
    def of(cls, model: torch.nn.Module, schema: Schema) -> LiveWeights:
        """Find every tensor of `schema` (the view that is served) in `model`.

        Raises SchemaMismatchError that lists names without counterpart on either side, and tensors
        of another dtype or shape; UsageError for a tensor that cannot be written through.
        """
        words = []
        wrong = []
        for spec, tensor in select(schema, model.state_dict()):
            got = spec_of(spec.name, tensor)
            if not tensor.is_contiguous():
                raise UsageError(f"tensor {spec.name} is not contiguous in the loaded model")
            if got == spec:
                words.append(tensor.detach().view(_BITS[spec.word_bytes]).view(-1))
            elif (got.dtype, spec.dtype) == ("F32", "BF16"):
                words.append(_upper_halves(tensor))
                _check_lower_halves(spec.name, words[-1])
            else:
                wrong.append(f"{spec.name}: the model holds {got.dtype}, the view is {spec.dtype}")
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise SchemaMismatchError("; ".join(wrong[:8]) + more)
        return cls(schema, words)

    @property
    def schema(self) -> Schema:
        return self._schema

    def read(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop); on a CPU a view of the live storage where that is possible.

        Raises EngineError if float32 storage holds more than the BF16 word that it stands for.
        """
        spec = spec_for(self._schema, name, start, stop)
        piece = self._words[self._schema.index[name]][start:stop]
        _check_lower_halves(name, piece)
        words: Words = piece.contiguous().cpu().numpy().view(word_dtype(spec))
        words.flags.writeable = False
        return words

    def prepare(self, update: UpdateSet) -> Change:
        """Check an update set against the live words and move it to the device.

        Raises EngineError naming the tensor when indices, dtypes or bounds are wrong, when the old
        bits are not the live ones, or when tied names would get different values.
        """
        _check_ties(self._ties, update, self._schema)
        patches = tuple(self._patch(item) for item in update.updates if item.new.size)
        return Change(patches, update.num_changed)

    def _patch(self, item: TensorUpdate) -> Patch:
        if not 0 <= item.tensor < len(self._schema):
            raise EngineError(f"stage names tensor {item.tensor} of {len(self._schema)}")
        spec = self._schema.tensors[item.tensor]
        _check_bounds(item, spec)
        live = self._words[item.tensor]
        where: slice | torch.Tensor = slice(item.start, item.stop)
        if item.positions is not None:
            where = _on_device(item.positions, torch.int64, live.device)
        bits = _BITS[spec.word_bytes]
        patch = Patch(
            name=spec.name,
            live=live,
            where=where,
            new=_on_device(item.new, bits, live.device),
            old=_on_device(item.old, bits, live.device),
        )
        if not patch.holds(patch.old):
            wrong = int((live[where] != patch.old).sum())
            raise EngineError(
                f"tensor {spec.name}: {wrong} of {item.old.size} old words in the stage are not "
                "the live ones"
            )
        return patch


def _upper_halves(tensor: torch.Tensor) -> torch.Tensor:
    """The BF16 words inside contiguous float32 storage (little-endian): every second int16."""
    return tensor.detach().view(torch.int32).view(-1).view(torch.int16)[1::2]


def _check_lower_halves(name: str, words: torch.Tensor) -> None:
    if words.numel() and words.stride(0) == 2:
        halves = words.as_strided(words.shape, (2,), words.storage_offset() - 1)
        if bool(halves.any()):
            raise EngineError(f"tensor {name}: the model holds values that BF16 cannot express")


def _check_bounds(item: TensorUpdate, spec: TensorSpec) -> None:
    if item.new.dtype != word_dtype(spec):
        raise EngineError(f"tensor {spec.name}: stage has {item.new.dtype} words, not {spec.dtype}")
    if item.first < 0 or item.last >= spec.num_words:
        raise EngineError(
            f"tensor {spec.name}: stage writes words {item.first} to {item.last} of "
            f"{spec.num_words}"
        )
    if item.positions is not None and not bool((np.diff(item.positions) > 0).all()):
        raise EngineError(f"tensor {spec.name}: positions in the stage do not ascend")


def _on_device(
    array: np.ndarray[tuple[int], np.dtype[np.generic]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A private tensor with the array's bits: stages outlive the request that brought them."""
    signed = array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
    return torch.from_numpy(signed.copy()).view(dtype).to(device)


def _ties(words: Iterable[torch.Tensor]) -> list[list[int]]:
    """Groups of schema indices that share their storage."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, tensor in enumerate(words):
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.numel(), tensor.dtype)
            groups.setdefault(key, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _check_ties(ties: list[list[int]], update: UpdateSet, schema: Schema) -> None:
    """Names of one storage must be changed alike, or the last one written would win silently."""
    for group in ties:
        first, *others = (_normal(update, index) for index in group)
        if any(not _same(first, other) for other in others):
            names = ", ".join(schema.tensors[index].name for index in group)
            raise EngineError(f"the stage gives different values to tied tensors: {names}")


def _normal(update: UpdateSet, tensor: int) -> tuple[np.ndarray, np.ndarray]:
    """All really changed positions of a tensor and their new words, ascending."""
    items = [item for item in update.updates if item.tensor == tensor and item.new.size]
    if not items:
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    positions = np.concatenate([item.flat_positions() for item in items])
    new = np.concatenate([item.new for item in items])
    moved = new != np.concatenate([item.old for item in items])
    order = np.argsort(positions[moved], kind="stable")
    return positions[moved][order], new[moved][order]


def _same(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
