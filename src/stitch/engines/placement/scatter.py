"""A stage on one rank: an update set's words placed, checked, written and undone in place.

Few changes of a storage are written one by one. Where many lie close together, whole windows are
copied, which takes less time from about one word in eight on (CPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stitch.codec import TensorUpdate
from stitch.engines.placement.blocks import Block
from stitch.engines.placement.live import LiveTensors
from stitch.engines.placement.pile import Part, Pile, Room
from stitch.engines.placement.placement import Placement
from stitch.engines.placement.readback import widened
from stitch.errors import EngineError, FatalReplicaError
from stitch.types import TensorSpec

DENSE_FROM_CPU = 0.12
"""Share of changed words from which copying a window is faster than writing them one by one."""
DENSE_FROM_DEVICE = 0.06

Offsets = npt.NDArray[np.int64]


class Staged:
    """Collects changes, each checked against the live words; `seal` ends that.

    The updates' arrays must not be changed afterwards: on a CPU they are used as they are. Nothing
    that is served changes before `write`.
    """

    def __init__(
        self,
        live: LiveTensors,
        *,
        tied: Iterable[str] = (),
        dense_limit_bytes: int = 1 << 32,
        dense_from: float | None = None,
    ) -> None:
        """tied: names whose changes are kept for `check_ties`. dense_limit_bytes: memory for
        windows that are copied whole. dense_from: share of changes from which they are.
        """
        self._live = live
        self._tied: dict[str, list[tuple[str, Offsets, Any, Any]]] = {name: [] for name in tied}
        self._piles: dict[str, Pile] = {}
        self._room = Room(dense_limit_bytes)
        self._dense_from = dense_from
        self.num_local = 0
        """Live words that are written."""

    # --- collecting ---------------------------------------------------------------------------

    def add(self, update: TensorUpdate, spec: TensorSpec, placement: Placement) -> None:
        """Take one tensor's changes, as far as they live here.

        Raises EngineError, with nothing written, if old words are not the live ones.
        """
        if not update.new.size:
            return
        if update.positions is None:
            for block in placement.between(spec.name, update.start, update.stop):
                self._add_span(update, spec, block)
            return
        for block, span, mask, offsets in placement.resolve(spec.name, update.positions):
            new, old = update.new[span], update.old[span]
            if mask is not None:
                new, old = new[mask], old[mask]
            self._add(block, spec, offsets, new, old)

    def _add_span(self, update: TensorUpdate, spec: TensorSpec, block: Block) -> None:
        """Changes without positions: every element of a span."""
        lo, hi = max(update.start, block.source), min(update.stop, block.source_stop)
        span = slice(lo - update.start, hi - update.start)
        new, old = update.new[span], update.old[span]
        if block.is_run:
            self._add_run(block, spec, block.live + lo - block.source, new, old)
            return
        _, mask, offsets = block.locate(np.arange(lo, hi, dtype=np.int64))
        if mask is not None:
            new, old = new[mask], old[mask]
        if offsets.size:
            self._add(block, spec, offsets, new, old)

    def _add(self, block: Block, spec: TensorSpec, offsets: Offsets, new: Any, old: Any) -> None:
        if spec.name in self._tied:
            self._tied[spec.name].append((block.key, offsets, new, old))
        pile = self._pile(block.key)
        device = pile.storage.words.device
        part = Part(
            _tensor(offsets).to(device),
            _to_live(new, block, device),
            _to_live(old, block, device),
            ascending=block.is_ascending,
        )
        _check_old(pile.storage.words.index_select(0, part.offsets), part.old, spec)
        self.num_local += offsets.size
        pile.add(part)

    def _add_run(self, block: Block, spec: TensorSpec, start: int, new: Any, old: Any) -> None:
        if spec.name in self._tied:
            offsets = np.arange(start, start + new.size, dtype=np.int64)
            self._tied[spec.name].append((block.key, offsets, new, old))
        pile = self._pile(block.key)
        device = pile.storage.words.device
        values, before = _to_live(new, block, device), _to_live(old, block, device)
        _check_old(pile.storage.words[start : start + values.numel()], before, spec)
        self.num_local += values.numel()
        pile.add_run(start, values, before)

    def _pile(self, key: str) -> Pile:
        if key not in self._piles:
            storage = self._live[key]
            share = self._dense_from
            if share is None:
                cpu = storage.words.device.type == "cpu"
                share = DENSE_FROM_CPU if cpu else DENSE_FROM_DEVICE
            self._piles[key] = Pile(storage, self._room, share)
        return self._piles[key]

    def check_ties(self, groups: Iterable[frozenset[str]]) -> None:
        """Raise EngineError unless names that share their live words change alike."""
        for group in groups:
            first, *others = (_normal(self._tied[name]) for name in sorted(group))
            if any(other != first for other in others):
                raise EngineError(
                    "the stage gives different values to tied tensors: " + ", ".join(sorted(group))
                )

    def seal(self) -> None:
        """End the collecting."""
        for pile in self._piles.values():
            pile.seal()

    # --- writing ------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Memory of the stage."""
        tensors = (tensor for pile in self._piles.values() for tensor in pile.tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def dense_bytes(self) -> int:
        """Live memory that is written by copies of windows."""
        return self._room.used_bytes

    def write(self) -> None:
        """Put the new words into the live tensors and read them back.

        Raises EngineError if something else is read; an undo restores what was written.
        """
        with torch.no_grad():
            for key, pile in self._piles.items():
                if not pile.write(pile.new()):
                    raise EngineError(f"{key}: the words read back are not those written")

    def undo(self) -> None:
        """Put the old words back; FatalReplicaError if something else is read back."""
        with torch.no_grad():
            for key, pile in self._piles.items():
                if not pile.write(pile.old()):
                    raise FatalReplicaError(f"{key}: the old words were not restored")


def _tensor(array: Any) -> torch.Tensor:
    """An array as a tensor: the same memory, unless that is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _to_live(words: Any, block: Block, device: torch.device) -> torch.Tensor:
    """Live words for an update's words; on the CPU the same memory where that is possible."""
    moved = _tensor(words.view(f"<i{words.itemsize}" if words.itemsize > 1 else "u1")).to(device)
    return widened(moved) if block.widen else moved


def _check_old(held: torch.Tensor, wanted: torch.Tensor, spec: TensorSpec) -> None:
    if not torch.equal(held, wanted):
        wrong = int((held != wanted).sum())
        raise EngineError(
            f"tensor {spec.name}: {wrong} of {wanted.numel()} old words in the stage are not the "
            "live ones"
        )


def _normal(entries: list[tuple[str, Offsets, Any, Any]]) -> dict[str, tuple[bytes, bytes]]:
    """Storage key -> sorted offsets of really changed words, and their new words, as bytes."""
    normal: dict[str, tuple[bytes, bytes]] = {}
    for key in {entry[0] for entry in entries}:
        mine = [entry for entry in entries if entry[0] == key]
        offsets, new, old = (np.concatenate([entry[i] for entry in mine]) for i in (1, 2, 3))
        changed = new != old
        offsets, new = offsets[changed], new[changed]
        order = np.argsort(offsets, kind="stable")
        if offsets.size:
            normal[key] = offsets[order].tobytes(), new[order].tobytes()
    return normal
