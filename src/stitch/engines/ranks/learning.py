"""How one rank learns where its weights live: record, read back, learn the rest by digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from stitch.engines.placement.blocks import Block, UnmappableError
from stitch.engines.placement.copies import split_copies
from stitch.engines.placement.live import (
    LiveTensors,
    ModuleGuard,
    StandIns,
    attribute_tensors,
)
from stitch.engines.placement.placement import Placement
from stitch.engines.placement.readback import read_back
from stitch.engines.placement.record import Load, Recording, Weights, record
from stitch.engines.placement.shadow import Run, learn_digits
from stitch.tensors.reader import WeightReader, spans
from stitch.tensors.torch_state import BITS, TORCH_DTYPES
from stitch.types import Schema

Build = Callable[[Weights], torch.nn.Module]

MIN_HIDDEN_WORDS = 256
"""Smaller tensors outside parameters and buffers are not suspected to be copies of weights."""


@dataclass(eq=False)
class Learned:
    """`placement` was read back in full; `refused`: name -> why it is not in it."""

    live: LiveTensors
    placement: Placement
    refused: dict[str, str] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    """Name that the loader ignores -> placed name with the same words."""
    notes: list[str] = field(default_factory=list)


def learn(
    model: torch.nn.Module,
    schema: Schema,
    load: Load,
    reader: WeightReader,
    build: Build | None = None,
) -> Learned:
    """Find every element of `schema` that lives on this rank. The live weights stay.

    Raises FatalReplicaError if they did not.
    """
    return _Learning(model, schema, load, reader, build).run()


class _Learning:
    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        load: Load,
        reader: WeightReader,
        build: Build | None,
    ) -> None:
        self._model = model
        self._schema = schema
        self._load = load
        self._reader = reader
        self._build = build
        self._live = LiveTensors(model)
        self._blocks: dict[str, list[Block]] = {}
        self._wrong: dict[str, str] = {}
        """Name -> what is wrong with what was learned of it so far."""
        self._notes: list[str] = []

    def run(self) -> Learned:
        recording = record(self._model, self._live, self._load, self._schema, self._reader)
        self._notes += recording.notes
        self._take(recording.blocks, {})
        self._wrong.update(recording.lost)
        hidden = self._adopt(recording)
        derived = {name for _, names in recording.derived.values() for name in names}
        again = derived | set(recording.lost)
        if again:
            self._by_digits(again, self._swapped, "read where the loader leaves them")
        if self._build is not None and (self._wrong or hidden):
            names = set(self._schema.index) if hidden else set(self._wrong)
            try:
                self._by_digits(names, self._second_model, "read in a second model")
            except Exception as error:  # the engine's own code: what is in doubt stays refused
                self._notes.append(f"no second model could be read: {error!r:.300}")
        self._check_derived(recording)
        for path in sorted(hidden):
            if not self._placed_in(path):
                self._notes.append(
                    f"{path} is held outside the parameters; no weight was found in it"
                )
        return self._result()

    # --- what each way finds -----------------------------------------------------------------

    def _take(self, blocks: dict[str, list[Block]], lost: dict[str, str]) -> None:
        """Adopt blocks for names, and read them back."""
        wrong = read_back(Placement(blocks), self._live, self._reader)
        for name, found in blocks.items():
            self._blocks[name] = found
            self._wrong.pop(name, None)
            if name in wrong:
                total = sum(block.num for block in found)
                self._wrong[name] = (
                    f"{wrong[name]} of {total} live words are not the checkpoint's where the "
                    "loader puts them: the engine rearranges or changes it after loading"
                )
        self._wrong.update(lost)

    def _by_digits(self, names: set[str], run: Run, how: str) -> None:
        """Learn `names` by digits; those that are right so far gain places outside parameters."""
        learned = learn_digits(self._schema, names, self._live, run)
        better: dict[str, list[Block]] = {}
        for name, found in learned.blocks.items():
            if name in self._wrong:
                better[name] = found
            else:
                known = {block.key for block in self._blocks.get(name, ())}
                extra = [block for block in found if block.key not in known]
                if extra:
                    better[name] = [*self._blocks.get(name, ()), *extra]
        lost = {name: why for name, why in learned.lost.items() if name in self._wrong}
        count = sum(name in self._wrong for name in better)
        self._take(better, lost)
        self._notes.append(f"{len(better)} tensors ({count} in doubt) were {how}")

    def _swapped(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Load into stand-ins for all live memory."""
        guard = ModuleGuard(self._model)
        with StandIns(self._live, zero=True) as stand_ins, torch.no_grad():
            try:
                self._load(weights)
            finally:
                guard.restore()
            yield from stand_ins.flats.items()

    def _second_model(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Load into a model of its own."""
        assert self._build is not None
        model = self._build(weights)
        other = LiveTensors(model)
        for path, tensor in attribute_tensors(model, other).items():
            other.adopt(path, tensor)
        for storage in other:
            yield storage.key, storage.flat

    # --- copies outside parameters -----------------------------------------------------------

    def _adopt(self, recording: Recording) -> set[str]:
        """Make other tensors part of the live memory; returns those that may be hidden copies."""
        hidden: set[str] = set()
        derived = recording.derived
        for path, tensor in attribute_tensors(self._model, self._live).items():
            if path in derived or self._suspicious(tensor):
                storage = self._live.adopt(path, tensor)
                if path not in derived and storage is not None and storage.key == path:
                    hidden.add(path)
        return hidden

    def _suspicious(self, tensor: torch.Tensor) -> bool:
        """Whether it may hold weights: of a served dtype, and no constant."""
        dtypes = {TORCH_DTYPES.get(spec.dtype) for spec in self._schema.tensors}
        if tensor.dtype not in dtypes or tensor.numel() < MIN_HIDDEN_WORDS:
            return False
        words = tensor.detach().reshape(-1).view(BITS[tensor.element_size()])
        return bool((words != words[0]).any())

    def _placed_in(self, key: str) -> int:
        return sum(
            block.num for blocks in self._blocks.values() for block in blocks if block.key == key
        )

    def _check_derived(self, recording: Recording) -> None:
        for path, (tensor, names) in recording.derived.items():
            key = self._live.key_of(tensor)
            if key is None or self._placed_in(key) < tensor.numel():
                for name in names:
                    self._wrong[name] = f"the engine computes {path} from it, by more than copying"

    # --- the outcome -------------------------------------------------------------------------

    def _result(self) -> Learned:
        for name, blocks in self._blocks.items():
            try:
                split_copies(blocks, self._schema[name].num_words)
            except UnmappableError as error:
                self._wrong.setdefault(name, str(error))
        placement = Placement(self._blocks).without(self._wrong)
        for group in placement.ties():
            if not _same_places(placement, group):
                for name in group:
                    self._wrong[name] = f"it shares some live words with {sorted(group - {name})}"
        placement = placement.without(self._wrong)
        twins = {}
        for name in self._schema.index:
            if name not in placement and name not in self._wrong:
                twin = self._twin(name, placement)
                if twin is not None:
                    twins[name] = twin
        return Learned(self._live, placement, self._wrong, twins, self._notes)

    def _twin(self, name: str, placement: Iterable[str]) -> str | None:
        """A placed tensor with the same words, such as the embedding for an ignored tied head."""
        spec = self._schema[name]
        if len(spec.shape) < 2:
            return None
        for other in placement:
            it = self._schema[other]
            if (it.dtype, it.shape) == (spec.dtype, spec.shape) and self._equal(name, other):
                return other
        return None

    def _equal(self, name: str, other: str) -> bool:
        varied = False
        for start, stop in spans(self._schema[name]):
            words = self._reader.read(name, start, stop)
            if not np.array_equal(words, self._reader.read(other, start, stop)):
                return False
            varied = varied or bool((words != words[0]).any())
        return varied


def _same_places(placement: Placement, group: frozenset[str]) -> bool:
    """Whether the names of a group live in the same words, all of them."""
    layouts = {
        tuple(
            sorted((block.key, block.live, block.live_stop, block.num) for block in placement[name])
        )
        for name in group
    }
    return len(layouts) == 1
