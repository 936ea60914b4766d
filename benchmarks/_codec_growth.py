"""How the time to apply `gaps` grows: with the number of changes, not with the tensor's size."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks._codec_data import Words, arrays, copy_of
from benchmarks._codec_timing import Best, no_garbage_collection, on_cores, restore
from benchmarks._codec_wires import Files, Stitch
from stitch.codec import DigestState
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec

DENSITY = 0.0005
FACTOR = 4
_FLUSH_BYTES = 1 << 26
"""Written between turns, so that the smaller tensor is no more in the cache than the larger."""


@dataclass(kw_only=True)
class _Case:
    """One tensor and one patch for it."""

    old: HostWeights
    wire: Stitch
    target: HostWeights
    files: Files
    apply: Best = field(default_factory=Best)


def measure_growth(old: HostWeights, *, rounds: int) -> dict[str, float]:
    """Apply times on one core, for tensors of n and 4 n elements with k and 4 k changes.

    4 n is what `old` has; k is 0.05 % of 4 n. Returns k and microseconds.
    """
    words = np.concatenate(arrays(old))
    size, few = words.size // FACTOR, int(words.size * DENSITY)
    with on_cores(1):
        cases = {
            "apply_n_k_us": _case(words[:size], few),
            "apply_4n_k_us": _case(words, few),
            "apply_4n_4k_us": _case(words, FACTOR * few),
        }
    flushed = np.zeros(_FLUSH_BYTES, np.uint8)
    for turn in range(rounds):
        with on_cores(1, turn), no_garbage_collection():
            for case in cases.values():
                case.apply.of(partial(case.wire.apply, case.files, case.target))
                restore(case.target, case.old)
                flushed += 1
    times = {name: case.apply.on(1) * 1e6 for name, case in cases.items()}
    return {"num_changed_k": few, **times}


def _case(words: Words, num_changed: int) -> _Case:
    """`num_changed` elements spread evenly over one tensor move to the next value."""
    schema = Schema.of([TensorSpec.of("weight", "BF16", (words.size,))])
    old = HostWeights(schema, [words.copy()])
    new = copy_of(old)
    places = np.linspace(0, words.size - 1, num_changed).astype(np.int64)
    new.words_at(0)[places] ^= np.uint16(1)
    wire = Stitch("gaps", DigestState.of(old), 1)
    files = wire.encode(old, new)
    wire.apply(files, target := copy_of(old))
    assert np.array_equal(target.words_at(0), new.words_at(0))
    restore(target, old)
    return _Case(old=old, wire=wire, target=target, files=files)
