"""Update sets: the changed positions of each tensor with their old and new words.

They are absolute (words, not differences), so applying one twice is harmless and undoing one is
writing the old words back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from stitch.codec import kernels
from stitch.codec.pool import ordered
from stitch.codec.words import Positions, Words
from stitch.errors import UsageError
from stitch.types import Schema

if TYPE_CHECKING:
    from stitch.tensors.host import HostWeights

_FEW = 64
"""Changed words that numpy writes before a compiled loop is entered (or even loaded)."""
_BATCH = 1 << 16
"""Words that one thread writes at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorUpdate:
    """Changes to one tensor (`tensor` is its schema index).

    positions: (k,) int64, strictly ascending flat word positions in the tensor; `start` is unused.
    Or None: every word of [start, start + k), of which some may be unchanged.
    new, old: (k,) words.
    """

    tensor: int
    positions: Positions | None
    start: int = 0
    new: Words
    old: Words

    def __post_init__(self) -> None:
        size, positions = self.new.size, self.positions
        same = size == self.old.size and (positions is None or size == positions.size)
        if not same or self.new.dtype != self.old.dtype:
            sizes = {size, self.old.size} | ({positions.size} if positions is not None else set())
            raise UsageError(
                f"update of tensor {self.tensor}: positions, new and old words differ in number or "
                f"dtype ({sorted(sizes)}, {self.new.dtype}, {self.old.dtype})"
            )

    @property
    def stop(self) -> int:
        """For an update without positions: one past its last word."""
        return self.start + self.new.size

    @property
    def first(self) -> int:
        """The lowest position written. The update must not be empty."""
        return self.start if self.positions is None else int(self.positions[0])

    @property
    def last(self) -> int:
        """The highest position written. The update must not be empty."""
        return self.stop - 1 if self.positions is None else int(self.positions[-1])

    @cached_property
    def num_changed(self) -> int:
        """Words whose bits differ."""
        return int(np.count_nonzero(self.new != self.old))

    @property
    def num_bytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return int(self.new.nbytes + self.old.nbytes + positions)

    def flat_positions(self) -> Positions:
        """(k,) the positions, made explicit."""
        if self.positions is None:
            return np.arange(self.start, self.stop, dtype=np.int64)
        return self.positions

    def check_target(self, target: Words) -> None:
        """Raise UsageError unless the update fits the whole tensor `target`, and may be written."""
        fits = not self.new.size or (self.first >= 0 and self.last < target.size)
        if not fits or target.dtype != self.new.dtype or not target.flags.writeable:
            raise UsageError(
                f"update of tensor {self.tensor} writes {self.new.dtype} words {self.first} to "
                f"{self.last}; the tensor has {target.size} {target.dtype} words"
                f"{'' if target.flags.writeable else ' and is read-only'}"
            )

    def write(self, target: Words, values: Words, lo: int = 0, hi: int | None = None) -> None:
        """Put `values[lo:hi]` of values (k,) at this update's places of the whole tensor `target`.

        The target has been checked.
        """
        values = values[lo:hi]
        if self.positions is None:
            target[self.start + lo : self.start + lo + values.size] = values
            return
        positions = self.positions[lo:hi]
        if positions.size < _FEW:
            target[positions] = values
            return
        written = kernels.scatter(positions, values, target)
        if written < positions.size:
            raise UsageError(
                f"update of tensor {self.tensor}: position {positions[written]} is not inside the "
                f"tensor of {target.size} words"
            )


_Piece = tuple[int, int, int]
"""Words [lo, hi) of an update, which comes first by its number."""


def _batches(updates: Sequence[TensorUpdate]) -> Iterator[list[_Piece]]:
    """All words of all updates, in lists that a thread writes at a time."""
    batch: list[_Piece] = []
    room = _BATCH
    for number, update in enumerate(updates):
        lo = 0
        while lo < update.new.size:
            hi = min(update.new.size, lo + room)
            batch.append((number, lo, hi))
            room -= hi - lo
            lo = hi
            if not room:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class UpdateSet:
    """Updates ordered by (tensor, first position), none empty, none sharing a word."""

    updates: list[TensorUpdate]

    @cached_property
    def num_changed(self) -> int:
        """Words whose bits differ, over all tensors."""
        return sum(update.num_changed for update in self.updates)

    @property
    def num_bytes(self) -> int:
        """Memory held by positions and words."""
        return sum(update.num_bytes for update in self.updates)

    def apply(self, weights: HostWeights, threads: int | None = None) -> None:
        """Write the new words in place, after checking that all of them fit."""
        self._write(weights, "new", threads)

    def undo(self, weights: HostWeights, threads: int | None = None) -> None:
        """Write the old words in place, after checking that all of them fit."""
        self._write(weights, "old", threads)

    def _write(self, weights: HostWeights, which: str, threads: int | None) -> None:
        targets = [weights.words_at(update.tensor) for update in self.updates]
        for update, target in zip(self.updates, targets, strict=True):
            update.check_target(target)

        def work(batch: list[_Piece]) -> None:
            for number, lo, hi in batch:
                update = self.updates[number]
                values = update.new if which == "new" else update.old
                update.write(targets[number], values, lo, hi)

        batches = list(_batches(self.updates))
        for _ in ordered(work, batches, 1 if len(batches) <= 1 else threads):
            pass

    @staticmethod
    def compose(sets: Sequence[UpdateSet]) -> UpdateSet:
        """One update set with the effect of `sets` in order; see :mod:`stitch.codec.compose`."""
        from stitch.codec.compose import compose

        return compose(sets)

    def to_bytes(self, schema: Schema) -> bytes:
        """A self-contained form; see docs/format.md, "Update sets"."""
        from stitch.codec.update_wire import to_bytes

        return to_bytes(self, schema)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, schema: Schema) -> UpdateSet:
        """Read :meth:`to_bytes`, trusting nothing. Words and positions are views into `data`.

        Raises CorruptPatchError, UnsupportedFormatError or SchemaMismatchError.
        """
        from stitch.codec.update_wire import from_bytes

        return from_bytes(data, schema)
