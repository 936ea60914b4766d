"""Changes to one live storage: scattered words, and windows that are copied whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from stitch.engines.placement.live import Storage

WINDOW_BITS = 18
WINDOW = 1 << WINDOW_BITS
"""Words of a window; windows begin at multiples of it."""
PIECE = 1 << 15
"""Single words that are written and read back at a time on a CPU."""
COMPACT = 1 / 3
"""Share of changed words from which a window takes less memory than single words with offsets."""

Where: TypeAlias = "slice | torch.Tensor"


@dataclass(eq=False)
class Part:
    """Single words: offsets (k,) int64, new and old words (k,). `ascending`: the offsets are."""

    offsets: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    ascending: bool = False

    def cut(self, ranges: Sequence[tuple[int, int]]) -> Part:
        """The entries of some ascending ranges."""
        if len(ranges) == 1:
            lo, hi = ranges[0]
            return Part(self.offsets[lo:hi], self.new[lo:hi], self.old[lo:hi], self.ascending)
        offsets, new, old = (
            torch.cat([column[lo:hi] for lo, hi in ranges])
            for column in (self.offsets, self.new, self.old)
        )
        return Part(offsets, new, old, self.ascending)


@dataclass(eq=False)
class Room:
    """Bytes that windows may still take, for all storages together."""

    free_bytes: int
    used_bytes: int = 0

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        self.used_bytes += num_bytes
        return True


@dataclass(eq=False)
class Window:
    """New words of a window. Old ones too if many change; else they are among Pile.moved."""

    new: torch.Tensor
    old: torch.Tensor | None


@dataclass(eq=False)
class Pile:
    """What a stage writes to one storage.

    dense_from: share of changed words from which a window is copied whole.
    """

    storage: Storage
    room: Room
    dense_from: float
    parts: list[Part] = field(default_factory=list)
    moved: list[Part] = field(default_factory=list)
    """Single words that windows write, kept for the undo."""
    windows: dict[int, Window] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Take single words."""
        count = part.offsets.numel()
        extent = abs(int(part.offsets[-1]) - int(part.offsets[0])) + 1
        if self.windows or count >= self.dense_from * min(extent, WINDOW):
            part = self._sort_out(part)
        if part.offsets.numel():
            self.parts.append(part)

    def add_run(self, start: int, new: torch.Tensor, old: torch.Tensor) -> None:
        """Take consecutive words from `start` on."""
        stop = start + new.numel()
        for number in range(start >> WINDOW_BITS, (stop - 1 >> WINDOW_BITS) + 1):
            first = number << WINDOW_BITS
            lo, hi = max(start, first), min(stop, first + WINDOW)
            mine = slice(lo - start, hi - start)
            window = self._window(number, hi - lo)
            if window is not None:
                window.new[lo - first : hi - first] = new[mine]
            if window is None or window.old is None:
                where = torch.arange(lo, hi, device=new.device)
                part = Part(where, new[mine], old[mine], ascending=True)
                (self.parts if window is None else self.moved).append(part)

    def seal(self) -> None:
        """Join the parts; windows take over what came before they were made."""
        if not self.parts:
            return
        whole = _joined(self.parts)
        if self.windows or whole.offsets.numel() >= self.dense_from * self._size(0):
            whole = self._sort_out(whole)
        self.parts = [whole] if whole.offsets.numel() else []

    def _size(self, number: int) -> int:
        """Words of a window."""
        return min(WINDOW, int(self.storage.words.numel()) - (number << WINDOW_BITS))

    def _sort_out(self, part: Part) -> Part:
        """Move what belongs to windows there; returns the rest."""
        if not self.windows:
            counts = torch.bincount(part.offsets >> WINDOW_BITS)
            if int(counts.max()) < self.dense_from * self._size(0):
                return part
        if not part.ascending:
            order = part.offsets.argsort()
            offsets, new, old = (
                column.index_select(0, order) for column in (part.offsets, part.new, part.old)
            )
            part = Part(offsets, new, old, ascending=True)
        found, sizes = torch.unique_consecutive(part.offsets >> WINDOW_BITS, return_counts=True)
        left: list[tuple[int, int]] = []
        moved: list[tuple[int, int]] = []
        end = 0
        for number, count in zip(found.tolist(), sizes.tolist(), strict=True):
            begin, end = end, end + count
            window = self._window(number, count)
            if window is None:
                _extend(left, begin, end)
                continue
            offsets = part.offsets[begin:end] - (number << WINDOW_BITS)
            window.new.scatter_(0, offsets, part.new[begin:end])
            if window.old is None:
                _extend(moved, begin, end)
        if moved:
            self.moved.append(part.cut(moved))
        return part.cut(left or [(0, 0)])

    def _window(self, number: int, count: int) -> Window | None:
        """The window for `count` changed words in it; None if they are better written singly."""
        if number in self.windows:
            return self.windows[number]
        size = self._size(number)
        if count < self.dense_from * size:
            return None
        live = self.storage.words[number << WINDOW_BITS : (number + 1) << WINDOW_BITS]
        compact = count >= COMPACT * size
        num_bytes = live.numel() * live.element_size()
        if not self.room.take(num_bytes) and not compact:
            return None
        window = Window(live.clone(), live.clone() if compact else None)
        self.windows[number] = window
        return window

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is held."""
        for part in (*self.parts, *self.moved):
            yield from (part.offsets, part.new, part.old)
        for window in self.windows.values():
            yield window.new
            if window.old is not None:
                yield window.old

    def new(self) -> Iterator[tuple[Where, torch.Tensor]]:
        """(where, words) of every write."""
        for number, window in self.windows.items():
            yield _span(number, window.new), window.new
        for part in self.parts:
            yield part.offsets, part.new

    def old(self) -> Iterator[tuple[Where, torch.Tensor]]:
        """(where, words) of every write that undoes them."""
        for number, window in self.windows.items():
            if window.old is not None:
                yield _span(number, window.old), window.old
        for part in (*self.moved, *self.parts):
            yield part.offsets, part.old

    def write(self, what: Iterable[tuple[Where, torch.Tensor]]) -> bool:
        """Put words where they belong and read them back; False if something else stands there.

        On a CPU piece by piece, so that they are read back while they are in its caches.
        """
        words = self.storage.words
        piece = PIECE if words.device.type == "cpu" else max(1, int(words.numel()))
        held = True
        for where, values in what:
            if isinstance(where, slice):
                self.put(where, values)
                held &= self.holds(where, values)
                continue
            for lo in range(0, values.numel(), piece):
                part, some = where[lo : lo + piece], values[lo : lo + piece]
                self.put(part, some)
                held &= self.holds(part, some)
        return held

    def put(self, where: Where, values: torch.Tensor) -> None:
        words = self.storage.words
        if isinstance(where, slice):
            words[where].copy_(values)
        else:
            words.scatter_(0, where, values)

    def holds(self, where: Where, values: torch.Tensor) -> bool:
        """Whether the live words are these."""
        words = self.storage.words
        if not isinstance(where, slice):
            return bool(torch.equal(words.index_select(0, where), values))
        held = words[where]
        if values.numel() * values.element_size() % 8 == 0:  # far faster as wide words
            held, values = held.view(torch.int64), values.view(torch.int64)
        return bool(torch.equal(held, values))


def _span(number: int, words: torch.Tensor) -> slice:
    first = number << WINDOW_BITS
    return slice(first, first + words.numel())


def _extend(ranges: list[tuple[int, int]], lo: int, hi: int) -> None:
    if ranges and ranges[-1][1] == lo:
        ranges[-1] = (ranges[-1][0], hi)
    else:
        ranges.append((lo, hi))


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.offsets, part.new, part.old) for part in parts), strict=True)
    return Part(*map(torch.cat, columns))
