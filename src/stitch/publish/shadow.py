"""Snapshots of which only what changed leaves the device that holds the tensors.

A host buffer that was filled some snapshots ago becomes the newest one by the changes since then.
So a copy of the last snapshot, the shadow, stays on the device: comparing with it finds the
changes, and the buffers, which take turns, are brought up to date from a short list of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stitch.codec.torch_changes import differing, elements
from stitch.codec.torch_digest import words64
from stitch.codec.words import Words
from stitch.tensors import HostWeights
from stitch.tensors.device import as_bits, flat_source, host_bits, host_words
from stitch.tensors.torch_state import BITS, copy_words
from stitch.types import Schema, TensorSpec

_CHUNK_BYTES = 32 << 20
"""Compared at a time. The scratch for it on the device is at most three times as much."""

_DENSE = 8
"""A chunk of which more than one in so many 64-bit words changed is copied whole."""

_KEPT = 4
"""Snapshots that are told apart. A buffer that was filled before them is filled anew."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """New words of one tensor, at `start + positions`, or all from `start` on."""

    tensor: int
    start: int
    positions: npt.NDArray[np.int32] | None
    words: Words

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def write_to(self, buffer: HostWeights) -> None:
        """Overwrite what changed; `buffer` holds the rest."""
        out = buffer.words_at(self.tensor)[self.start :]
        if self.positions is None:
            out[: self.words.size] = self.words
        else:
            out[self.positions] = self.words


@dataclass(eq=False)
class _Taken:
    """One snapshot: the stamp of the buffer that holds it, and what leads to it from the last."""

    changes: list[_Change] = field(default_factory=list)
    num_bytes: int = 0


class Shadow:
    """The words of the last snapshot, where the tensors live. Used by one thread at a time.

    Costs the view once in the tensors' memory, allocated by the first snapshot, and on the host at
    most an eighth of the view for the changes that older buffers lack.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._max_bytes = schema.num_bytes // 8
        self._words: dict[int, torch.Tensor] = {}
        self._taken: deque[_Taken] = deque()

    def fill(self, buffer: HostWeights, tensors: Iterable[tuple[TensorSpec, Any]]) -> None:
        """Make `buffer` a snapshot of `tensors`, all of the schema's, and return when it is one.

        Whole tensors are copied where `buffer` does not hold one of the last snapshots, where a
        tensor came to another device, and where much changed. numpy arrays are always copied.
        Raises what `tensors` raises and what torch raises (its OutOfMemoryError); the shadow then
        starts anew.
        """
        try:
            # Tensors made in inference mode could not be written to outside it.
            with torch.inference_mode(False), torch.no_grad():
                taken = self._take(buffer, tensors)
        except BaseException:
            self.forget()
            raise
        self._keep(taken)
        buffer.stamp = taken

    def forget(self) -> None:
        """Give back all memory. The next snapshot is copied whole."""
        self._words.clear()
        while self._taken:
            self._drop_oldest()

    def _take(self, buffer: HostWeights, tensors: Iterable[tuple[TensorSpec, Any]]) -> _Taken:
        is_known = self._catch_up(buffer)
        taken = _Taken()
        for spec, tensor in tensors:
            index = self._schema.index[spec.name]
            if isinstance(tensor, np.ndarray):
                copy_words(spec, tensor, buffer.words_at(index))
                self._words.pop(index, None)
                continue
            self._take_tensor(index, tensor, buffer, taken, whole=not is_known)
        self._wait()
        return taken

    def _wait(self) -> None:
        """Until the shadow is written: whoever fills next may use another stream of the device."""
        for words in {w.device: w for w in self._words.values() if w.numel()}.values():
            words[-1:].cpu()  # comes after all that was begun on this device before

    def _catch_up(self, buffer: HostWeights) -> bool:
        """Make `buffer` the last snapshot if it holds an earlier one; say whether it did."""
        taken = list(self._taken)
        if buffer.stamp not in taken:
            return False
        for later in taken[taken.index(buffer.stamp) + 1 :]:
            for change in later.changes:
                change.write_to(buffer)
        return True

    def _take_tensor(
        self, index: int, tensor: torch.Tensor, buffer: HostWeights, taken: _Taken, *, whole: bool
    ) -> None:
        spec = self._schema.tensors[index]
        source = flat_source(spec, tensor)
        is_new = index not in self._words or self._words[index].device != source.device
        if is_new:
            self._words[index] = torch.empty(
                spec.num_words, dtype=BITS[spec.word_bytes], device=source.device
            )
            taken.num_bytes = self._max_bytes + 1  # what older buffers lack is not known
        held = self._words[index]
        chunk = _CHUNK_BYTES // spec.word_bytes
        for start in range(0, spec.num_words, chunk):
            # The live words are read once: buffer and shadow agree even if someone writes to them.
            mine = held[start : start + chunk]
            words = as_bits(spec, source[start : start + chunk])
            if is_new:
                mine.copy_(words)
            elif (change := _update(mine, words, index, start)) is not None:
                self._record(taken, change)
                change.write_to(buffer)
            if whole or is_new:
                host_bits(buffer.words_at(index)[start : start + chunk]).copy_(mine)

    def _record(self, taken: _Taken, change: _Change) -> None:
        taken.num_bytes += change.num_bytes
        if taken.num_bytes <= self._max_bytes:
            taken.changes.append(change)
        else:
            taken.changes.clear()

    def _keep(self, taken: _Taken) -> None:
        """Remember `taken` as the last one, and as many before it as the memory allows."""
        self._taken.append(taken)
        while len(self._taken) > _KEPT or self._num_bytes() > self._max_bytes:
            self._drop_oldest()
        self._taken[0].changes.clear()  # nothing is kept that they would lead on from

    def _drop_oldest(self) -> None:
        self._taken.popleft().changes.clear()  # as a stamp it may live on

    def _num_bytes(self) -> int:
        return sum(taken.num_bytes for taken in list(self._taken)[1:])


def _update(held: torch.Tensor, words: torch.Tensor, tensor: int, start: int) -> _Change | None:
    """Make `held` (n,) equal to `words` (n,); return what that changed, if anything."""
    parts = [
        (base, old64, new64, differing(old64, new64))
        for (base, old64), (_, new64) in zip(words64(held), words64(words), strict=True)
    ]
    num_changed = sum(index.numel() for *_, index in parts)
    if not num_changed:
        return None
    if num_changed * _DENSE > sum(old64.numel() for _, old64, *_ in parts):
        held.copy_(words)
        # A copy also on the CPU, where `host_words` gives a view.
        return _Change(tensor=tensor, start=start, positions=None, words=host_words(held).copy())
    per = 8 // held.element_size()
    found = []
    for base, old64, new64, index in parts:
        positions, _, news = elements(index, old64[index], new64[index], held.dtype)
        found.append((positions + base * per, news))
    positions = torch.cat([positions for positions, _ in found])
    news = torch.cat([news for _, news in found])
    held[positions] = news
    return _Change(
        tensor=tensor,
        start=start,
        positions=positions.to(torch.int32).cpu().numpy(),
        words=host_words(news),
    )
