"""A stage on one rank: new and old words by live storage, written and undone in place.

Few changes of a storage are written one by one. Where many lie close together, whole windows are
copied: a copy of n words takes less time than n / 100 scattered writes or so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stitch.codec import TensorUpdate
from stitch.engines.placement.blocks import Block
from stitch.engines.placement.live import LiveTensors, Storage
from stitch.engines.placement.placement import Placement
from stitch.engines.placement.readback import widened
from stitch.errors import EngineError, FatalReplicaError
from stitch.types import TensorSpec

WINDOW_BITS = 18
WINDOW = 1 << WINDOW_BITS
"""Words of a window; windows begin at multiples of it."""
DENSE_FROM_CPU = 0.01
"""Share of changed words from which copying a window is faster than writing them one by one."""
DENSE_FROM_DEVICE = 0.06
_COMPACT = 1 / 3
"""Share from which a window also takes less memory, so that the limit does not apply."""

Offsets = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Part:
    """Scattered words of one storage: offsets (k,) int64, new and old words (k,)."""

    offsets: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


@dataclass(eq=False)
class _Pile:
    """What a stage writes to one storage. Windows: number -> (new, old) words of it."""

    storage: Storage
    parts: list[_Part] = field(default_factory=list)
    windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Staged:
    """Collects changes, each checked against the live words; `seal` ends that.

    Nothing that is served changes before `write`.
    """

    def __init__(
        self,
        live: LiveTensors,
        *,
        tied: Iterable[str] = (),
        dense_limit_bytes: int = 1 << 32,
        dense_from: float | None = None,
    ) -> None:
        """`tied`: names whose changes are kept for `check_ties`."""
        self._live = live
        self._tied: dict[str, list[tuple[str, Offsets, Any, Any]]] = {name: [] for name in tied}
        self._piles: dict[str, _Pile] = {}
        self._room_bytes = dense_limit_bytes
        self._dense_from = dense_from
        self.num_local = 0
        self.dense_bytes = 0

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
        if block.is_run:
            new, old = (
                words[lo - update.start : hi - update.start] for words in (update.new, update.old)
            )
            self._add_run(block, spec, block.live + lo - block.source, new, old)
            return
        positions = np.arange(lo, hi, dtype=np.int64)
        _, mask, offsets = block.locate(positions)
        new, old = (
            words[lo - update.start : hi - update.start] for words in (update.new, update.old)
        )
        if mask is not None:
            new, old = new[mask], old[mask]
        if offsets.size:
            self._add(block, spec, offsets, new, old)

    def _pile(self, key: str) -> _Pile:
        if key not in self._piles:
            self._piles[key] = _Pile(self._live[key])
        return self._piles[key]

    def _add(self, block: Block, spec: TensorSpec, offsets: Offsets, new: Any, old: Any) -> None:
        if spec.name in self._tied:
            self._tied[spec.name].append((block.key, offsets, new, old))
        pile = self._pile(block.key)
        device = pile.storage.words.device
        part = _Part(
            torch.from_numpy(offsets).to(device),
            _to_live(new, block, device),
            _to_live(old, block, device),
        )
        _check_old(pile.storage.words[part.offsets], part.old, spec)
        self.num_local += offsets.size
        share = self._share(pile.storage)
        extent = int(offsets[-1]) - int(offsets[0]) + 1
        if pile.windows or offsets.size >= share * min(abs(extent) or 1, WINDOW):
            part = self._to_windows(pile, part, share)
        if part.offsets.numel():
            pile.parts.append(part)

    def _add_run(self, block: Block, spec: TensorSpec, start: int, new: Any, old: Any) -> None:
        if spec.name in self._tied:
            offsets = np.arange(start, start + new.size, dtype=np.int64)
            self._tied[spec.name].append((block.key, offsets, new, old))
        pile = self._pile(block.key)
        device = pile.storage.words.device
        values, before = _to_live(new, block, device), _to_live(old, block, device)
        stop = start + values.numel()
        _check_old(pile.storage.words[start:stop], before, spec)
        self.num_local += values.numel()
        for number in range(start >> WINDOW_BITS, (stop - 1 >> WINDOW_BITS) + 1):
            first = number << WINDOW_BITS
            lo, hi = max(start, first), min(stop, first + WINDOW)
            window = self._window(pile, number, (hi - lo) / WINDOW)
            if window is not None:
                window[lo - first : hi - first] = values[lo - start : hi - start]
                continue
            picked = slice(lo - start, hi - start)
            where = torch.arange(lo, hi, device=device)
            pile.parts.append(_Part(where, values[picked], before[picked]))

    def _share(self, storage: Storage) -> float:
        if self._dense_from is not None:
            return self._dense_from
        return DENSE_FROM_CPU if storage.words.device.type == "cpu" else DENSE_FROM_DEVICE

    def _window(self, pile: _Pile, number: int, share: float) -> torch.Tensor | None:
        """The new words of a window, made from the live ones; None if there is no room for it."""
        if number not in pile.windows:
            live = pile.storage.words[number << WINDOW_BITS : (number + 1) << WINDOW_BITS]
            num_bytes = 2 * live.numel() * live.element_size()
            if num_bytes > self._room_bytes and share < _COMPACT:
                return None
            self._room_bytes -= num_bytes
            self.dense_bytes += num_bytes // 2
            pile.windows[number] = live.clone(), live.clone()
        return pile.windows[number][0]

    def _to_windows(self, pile: _Pile, part: _Part, share: float) -> _Part:
        """Move what belongs to dense windows there; returns the rest."""
        if not pile.windows:
            counts = torch.bincount(part.offsets >> WINDOW_BITS)
            if int(counts.max()) < share * min(WINDOW, pile.storage.words.numel()):
                return part
        order = part.offsets.argsort()
        offsets, new, old = part.offsets[order], part.new[order], part.old[order]
        numbers = offsets >> WINDOW_BITS
        found, counts = torch.unique_consecutive(numbers, return_counts=True)
        ends = counts.cumsum(0).tolist()
        left: list[tuple[int, int]] = []
        size = pile.storage.words.numel()
        for number, count, end in zip(found.tolist(), counts.tolist(), ends, strict=True):
            first = number << WINDOW_BITS
            density = count / min(WINDOW, size - first)
            window = None
            if number in pile.windows or density >= share:
                window = self._window(pile, number, density)
            if window is None:
                left.append((end - count, end))
            else:
                window[offsets[end - count : end] - first] = new[end - count : end]
        if not left:
            return _Part(offsets[:0], new[:0], old[:0])
        return _Part(
            *(torch.cat([words[lo:hi] for lo, hi in left]) for words in (offsets, new, old))
        )

    def check_ties(self, groups: Iterable[frozenset[str]]) -> None:
        """Raise EngineError unless names that share their live words change alike."""
        for group in groups:
            first, *others = (_normal(self._tied[name]) for name in sorted(group))
            if any(other != first for other in others):
                raise EngineError(
                    "the stage gives different values to tied tensors: " + ", ".join(sorted(group))
                )

    def seal(self) -> None:
        """Gather the parts of each storage; windows take over what came before they were made."""
        for pile in self._piles.values():
            if not pile.parts:
                continue
            columns = (
                [p.offsets for p in pile.parts],
                [p.new for p in pile.parts],
                [p.old for p in pile.parts],
            )
            whole = _Part(*map(torch.cat, columns))
            share = self._share(pile.storage)
            if pile.windows or whole.offsets.numel() >= share * min(
                WINDOW, pile.storage.words.numel()
            ):
                whole = self._to_windows(pile, whole, share)
            pile.parts = [whole] if whole.offsets.numel() else []

    # --- writing ------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Memory of the stage on the device."""
        return sum(
            sum(t.numel() * t.element_size() for t in tensors)
            for pile in self._piles.values()
            for tensors in (
                [t for part in pile.parts for t in (part.offsets, part.new, part.old)],
                [t for pair in pile.windows.values() for t in pair],
            )
        )

    def write(self) -> None:
        """Put the new words into the live tensors."""
        with torch.no_grad():
            for where, new, _, words in self._jobs():
                words[where] = new

    def undo(self) -> None:
        """Put the old words back."""
        with torch.no_grad():
            for where, _, old, words in self._jobs():
                words[where] = old

    def check(self) -> None:
        """Raise EngineError unless the live tensors hold the new words."""
        self._check(new=True, error=EngineError)

    def check_undone(self) -> None:
        """Raise FatalReplicaError unless the live tensors hold the old words."""
        self._check(new=False, error=FatalReplicaError)

    def _check(self, *, new: bool, error: type[Exception]) -> None:
        for key, pile in self._piles.items():
            for where, after, before, words in _pile_jobs(pile):
                if not torch.equal(words[where], after if new else before):
                    raise error(f"{key}: the words read back are not those written")

    def _jobs(self) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
        for pile in self._piles.values():
            yield from _pile_jobs(pile)


def _pile_jobs(pile: _Pile) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(index, new words, old words, live words) of every write to one storage."""
    words = pile.storage.words
    for number, (new, old) in pile.windows.items():
        first = number << WINDOW_BITS
        yield slice(first, first + new.numel()), new, old, words
    for part in pile.parts:
        yield part.offsets, part.new, part.old, words


def _to_live(words: Any, block: Block, device: torch.device) -> torch.Tensor:
    """A private tensor of live words for an update's words."""
    signed = words.view(f"<i{words.itemsize}" if words.itemsize > 1 else "u1")
    moved = torch.from_numpy(np.array(signed)).to(device)
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
