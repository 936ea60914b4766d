"""The digest in torch, on whatever device the words are. See docs/format.md, "Digest".

Import it only where tensors are at hand: it imports torch. torch has no unsigned 64-bit
arithmetic, so everything is int64, which wraps alike; a shift must mask away copies of the sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from stitch.codec.constants import GOLDEN, MIX_1, MIX_2, MIX_3
from stitch.codec.words import Lanes
from stitch.tensors.reader import DeviceReader, Progress, spans

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_WORDS = 1 << 20
"""64-bit words mixed at a time: 24 MB of scratch on the device."""


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GOLDEN, _M1, _M2, _M3 = (_signed(constant) for constant in (GOLDEN, MIX_1, MIX_2, MIX_3))


def words64(words: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first, 64-bit words): the whole ones, and the padded tail if there is one.

    `words` (n,) begin on a 64-bit word of their tensor. No copy where torch can reinterpret them.
    """
    per = 8 // words.element_size()
    num_whole = words.numel() // per
    whole = words[: num_whole * per]
    if num_whole:
        yield 0, _reinterpreted(whole)
    if words.numel() > num_whole * per:
        tail = words.new_zeros(per)
        tail[: words.numel() - num_whole * per] = words[num_whole * per :]
        yield num_whole, tail.view(torch.int64)


def _reinterpreted(words: torch.Tensor) -> torch.Tensor:
    aligned = words.storage_offset() * words.element_size() % 8 == 0
    if words.stride(0) != 1 or not aligned:
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.int64)


def sum_words(words: torch.Tensor, first: int = 0) -> Lanes:
    """Digest lanes (2,) of words of one tensor; `first` is the index of their first 64-bit word.

    The same as `kernels.sum_words`. Bounded scratch memory, whatever the size.
    """
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    chunk = _CHUNK_WORDS * 8 // words.element_size()
    for start in range(0, words.numel(), chunk):
        for base, part in words64(words[start : start + chunk]):
            at = first + start * words.element_size() // 8 + base
            total += mixed_sum(part, torch.arange(at, at + part.numel(), device=words.device))
    return to_lanes(total)


def mixed_sum(words: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Lanes (2,) int64 of 64-bit words (n,), the i-th of which has index `index[i]`."""
    h = (index + 1).mul_(_GOLDEN)
    h.bitwise_xor_(words).mul_(_M1)
    h.bitwise_xor_(_shifted(h, 32)).mul_(_M2)
    h.bitwise_xor_(_shifted(h, 29))
    first = h.sum()
    h.mul_(_M3)
    h.bitwise_xor_(_shifted(h, 32))
    return torch.stack((first, h.sum()))


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shifted right, zeros coming in."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def to_lanes(total: torch.Tensor) -> Lanes:
    lanes: Lanes = total.cpu().numpy().view(np.uint64)
    return lanes


def sum_reader(reader: DeviceReader, progress: Progress | None = None) -> npt.NDArray[np.uint64]:
    """Lanes (num_tensors, 2) of everything that `reader` holds, summed where it is."""
    schema = reader.schema
    lanes = np.zeros((len(schema), 2), np.uint64)
    done = 0
    for tensor, spec in enumerate(schema.tensors):
        for start, stop in spans(spec, 1 << 30):
            words = reader.device_words(spec.name, start, stop)
            lanes[tensor] += sum_words(words, start * spec.word_bytes // 8)
            done += (stop - start) * spec.word_bytes
            if progress:
                progress(done, schema.num_bytes)
    return lanes
