"""Times codecs in turns, so that all of them meet the same noise, and keeps each one's best."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks._codec_data import Step, arrays, copy_of
from benchmarks._codec_sparse import Grail, IndexValue
from benchmarks._codec_wires import LIMITS, Limit, Stitch, Wire, Workers, stitch_encodings
from benchmarks._codec_xor import XorZstd
from stitch.codec import DigestState
from stitch.tensors import HostWeights

Result = TypeVar("Result")
MIN_ROUNDS = 2
PEERS = ("index+value", "grail", "grail+sha256", "xor+zstd1+xxh3")


def codec_names() -> list[str]:
    return [*stitch_encodings(), *PEERS, *LIMITS]


@dataclass(kw_only=True)
class Best:
    """The least of several times: of the process's own, over all threads, and of those elapsed.

    On one core the process's own time is what the elapsed time of an idle machine would be, since
    nothing here waits; and other work on the machine does not add to it.
    """

    own_s: float = float("inf")
    elapsed_s: float = float("inf")

    def of(self, function: Callable[[], Result]) -> Result:
        """Time one more call."""
        elapsed_s, own_s = -time.perf_counter(), -time.process_time()
        result = function()
        self.own_s = min(self.own_s, own_s + time.process_time())
        self.elapsed_s = min(self.elapsed_s, elapsed_s + time.perf_counter())
        return result

    def on(self, cores: int) -> float:
        """Seconds: its own on one core, elapsed on more."""
        return self.own_s if cores == 1 else self.elapsed_s


@dataclass(kw_only=True)
class Timing:
    """One codec on one step: its times, and the size of its patch unless it is a limit."""

    encode: Best = field(default_factory=Best)
    apply: Best = field(default_factory=Best)
    num_bytes: int | None = None


def wires_for(
    old: HostWeights, codecs: Sequence[str], workers: Workers, before: DigestState
) -> list[Wire]:
    """The wires among `codecs`, for steps from `old`, whose digests are `before`."""
    peers: dict[str, Callable[[], Wire]] = {
        "index+value": lambda: IndexValue(old, workers),
        "grail": lambda: Grail(old, workers, proof=False),
        "grail+sha256": lambda: Grail(old, workers, proof=True),
        "xor+zstd1+xxh3": lambda: XorZstd(workers),
    }
    own = stitch_encodings()
    return [
        Stitch(name, before, workers.cores) if name in own else peers[name]()
        for name in codecs
        if name not in LIMITS
    ]


@contextlib.contextmanager
def on_cores(count: int, turn: int = 0) -> Iterator[None]:
    """Keep this thread, and threads that it starts, on the first `count` cores; one takes turns."""
    all_cores = sorted(os.sched_getaffinity(0))
    chosen = all_cores[:count] if count > 1 else [all_cores[turn % len(all_cores)]]
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def sizes(step: Step, codecs: Sequence[str]) -> dict[str, int]:
    """Bytes of each wire's whole patch, after checking that it leads to the new weights."""
    workers = Workers(step.old, 1)
    before = DigestState.of(step.old)
    target = copy_of(step.old)
    found = {}
    for wire in wires_for(step.old, codecs, workers, before):
        found[wire.name] = _checked(wire, step, target)
    return found


def _checked(wire: Wire, step: Step, target: HostWeights) -> int:
    files = wire.encode(step.old, step.new)
    wire.apply(files, target)
    pairs = zip(step.new.schema.tensors, arrays(step.new), arrays(target), strict=True)
    for spec, wanted, got in pairs:
        assert np.array_equal(wanted, got), f"{wire.name} on {step.name}: {spec} arrived changed"
    restore(target, step.old)
    return sum(map(len, files))


def restore(target: HostWeights, old: HostWeights) -> None:
    """A whole copy, which also leaves no codec the changed places in the cache."""
    for words, source in zip(arrays(target), arrays(old), strict=True):
        np.copyto(words, source)


def measure(
    step: Step, codecs: Sequence[str], cores: int, *, rounds: int, budget_s: float
) -> dict[str, Timing]:
    """Every codec on one step: sizes, and the best of `rounds` turns or of what the time allows."""
    with on_cores(cores):
        workers = Workers(step.old, cores)
        target = copy_of(step.old)
        wires = wires_for(step.old, codecs, workers, DigestState.of(step.old))
        limits = [Limit(name, workers, copy_of(step.old)) for name in codecs if name in LIMITS]
        timings = {name: Timing() for name in codecs}
        for wire in wires:  # the first turn checks, and warms what there is to warm
            timings[wire.name].num_bytes = _checked(wire, step, target)
        for limit in limits:
            limit.run(step.new)
    started_s = time.perf_counter()
    done = 0
    while done < rounds and (done < MIN_ROUNDS or time.perf_counter() - started_s < budget_s):
        with on_cores(cores, done), no_garbage_collection():
            for wire in wires:
                _turn(wire, step, target, timings[wire.name])
            for limit in limits:
                timings[limit.name].encode.of(partial(limit.run, step.new))
        done += 1
    workers.close()
    for limit in limits:
        timings[limit.name].apply = timings[limit.name].encode
    return timings


def _turn(wire: Wire, step: Step, target: HostWeights, timing: Timing) -> None:
    files = timing.encode.of(partial(wire.encode, step.old, step.new))
    timing.apply.of(partial(wire.apply, files, target))
    restore(target, step.old)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
