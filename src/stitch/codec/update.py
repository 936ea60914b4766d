"""Update sets: the changed positions of each tensor with their old and new words.

They are absolute (words, not differences), so applying one twice is harmless and undoing one is
writing the old words back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from stitch.codec import kernels
from stitch.codec.pool import ordered
from stitch.codec.words import Positions, Words
from stitch.errors import UsageError
from stitch.types import Schema

if TYPE_CHECKING:
    from stitch.tensors.host import HostWeights

Tensors = npt.NDArray[np.int64]
"""(n,) schema indices."""

_FEW = 64
"""Changed words that numpy writes before a compiled loop is entered (or even loaded)."""
_BATCH = 1 << 15
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


@dataclass(frozen=True, kw_only=True, eq=False)
class JointUpdate:
    """Changes to slices of tensors of one dtype, one slice after another, as decoding finds them.

    tensors: (n,) int64, the schema index of each slice's tensor. ends: (n,) int64, where each
    slice's changes end. positions: (k,) int64 flat word positions in the slice's tensor, strictly
    ascending in each slice. new, old: (k,) words.
    """

    tensors: Tensors
    ends: npt.NDArray[np.int64]
    positions: Positions
    new: Words
    old: Words

    def __post_init__(self) -> None:
        assert self.new.size == self.old.size == self.positions.size == self.ends[-1]
        assert self.new.dtype == self.old.dtype
        assert self.tensors.size == self.ends.size

    @cached_property
    def num_changed(self) -> int:
        """Words whose bits differ."""
        return int(np.count_nonzero(self.new != self.old))

    @property
    def num_bytes(self) -> int:
        return int(self.new.nbytes + self.old.nbytes + self.positions.nbytes)

    def updates(self) -> Iterator[TensorUpdate]:
        """The same, slice by slice; slices without changes are left out."""
        bounds = pairwise([0, *self.ends.tolist()])
        for tensor, (lo, hi) in zip(self.tensors.tolist(), bounds, strict=True):
            if hi > lo:
                yield TensorUpdate(
                    tensor=tensor,
                    positions=self.positions[lo:hi],
                    new=self.new[lo:hi],
                    old=self.old[lo:hi],
                )

    def check_targets(self, weights: HostWeights) -> None:
        """Raise UsageError unless the update fits the tensors, and may be written there."""
        targets = map(weights.words_at, self.tensors.tolist())
        dtype, extents = self.new.dtype, weights.extents
        if not (
            all(words.dtype == dtype and words.flags.writeable for words in targets)
            and kernels.are_inside(extents[self.tensors], self.ends, self.positions)
        ):
            for update in self.updates():
                update.check_target(weights.words_at(update.tensor))

    def write(self, weights: HostWeights, values: Words, lo: int, hi: int) -> None:
        """Put `values[lo:hi]` of values (k,) at their places. `check_targets` has been called."""
        extents = weights.extents[self.tensors]
        kernels.scatter_joint(extents, self.ends, self.positions, values, lo, hi)


_Write = Callable[[int, int], None]
"""Writes words [lo, hi) of an update."""


def _batches(writes: Sequence[tuple[_Write, int]]) -> Iterator[list[tuple[_Write, int, int]]]:
    """All words of updates that have so many, in lists that a thread writes at a time."""
    batch: list[tuple[_Write, int, int]] = []
    room = _BATCH
    for write, size in writes:
        lo = 0
        while lo < size:
            hi = min(size, lo + room)
            batch.append((write, lo, hi))
            room -= hi - lo
            lo = hi
            if not room:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _write_batch(batch: list[tuple[_Write, int, int]]) -> None:
    for write, lo, hi in batch:
        write(lo, hi)


class UpdateSet:
    """Updates ordered by (tensor, first position), none empty, none sharing a word."""

    def __init__(
        self, updates: Sequence[TensorUpdate] = (), joint: Sequence[JointUpdate] = ()
    ) -> None:
        """Updates in order; or in any order, together with what `joint` updates consist of."""
        self._alone, self._joint = list(updates), list(joint)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles make `updates` anew: they are views of what is joint."""
        return {name: value for name, value in self.__dict__.items() if name != "updates"}

    @property
    def _all(self) -> list[TensorUpdate | JointUpdate]:
        return [*self._alone, *self._joint]

    @cached_property
    def updates(self) -> list[TensorUpdate]:
        if not self._joint:
            return self._alone
        updates = [*self._alone]
        for joint in self._joint:
            updates += joint.updates()
        return sorted(updates, key=lambda update: (update.tensor, update.first))

    @cached_property
    def num_changed(self) -> int:
        """Words whose bits differ, over all tensors."""
        return sum(update.num_changed for update in self._all)

    @property
    def num_bytes(self) -> int:
        """Memory held by positions and words."""
        return sum(update.num_bytes for update in self._all)

    def apply(self, weights: HostWeights, threads: int | None = None) -> None:
        """Write the new words in place, after checking that all of them fit."""
        self._write(weights, "new", threads)

    def undo(self, weights: HostWeights, threads: int | None = None) -> None:
        """Write the old words in place, after checking that all of them fit."""
        self._write(weights, "old", threads)

    def _write(
        self, weights: HostWeights, which: Literal["new", "old"], threads: int | None
    ) -> None:
        writes: list[tuple[_Write, int]] = []
        for update in self._alone:
            target = weights.words_at(update.tensor)
            update.check_target(target)
            writes.append((partial(update.write, target, getattr(update, which)), update.new.size))
        for joint in self._joint:
            joint.check_targets(weights)
            writes.append((partial(joint.write, weights, getattr(joint, which)), joint.new.size))
        batches = list(_batches(writes))
        for _ in ordered(_write_batch, batches, 1 if len(batches) <= 1 else threads):
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
