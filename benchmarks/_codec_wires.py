"""What a wire is to the benchmark, Stitch's own wires, and the limits that none can pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from benchmarks._codec_data import arrays
from benchmarks._codec_files import buffer
from stitch.codec import DigestState, PatchEncoder, decode_parts
from stitch.codec.encodings import ENCODINGS
from stitch.tensors import HostWeights

Item = TypeVar("Item")
Result = TypeVar("Result")
Files = Sequence[bytes]
"""One patch, with everything that travels."""


class Wire(Protocol):
    """One way to send a step between weights of one schema, on a fixed number of cores."""

    name: str

    def encode(self, old: HostWeights, new: HostWeights) -> Files:
        """Find what changed, encode it and prove it."""
        ...

    def apply(self, files: Files, weights: HostWeights) -> None:
        """Turn `weights` from old to new in place, and check the proof if the wire has one."""
        ...


class Workers:
    """Maps over tensors on `cores` threads, the largest first; on the caller's for one core."""

    def __init__(self, weights: HostWeights, cores: int) -> None:
        self.cores = cores
        self._sizes = [array.nbytes for array in arrays(weights)]
        self._pool = ThreadPoolExecutor(cores) if cores > 1 else None

    def map(self, function: Callable[[int], Result], tensors: Iterable[int]) -> list[Result]:
        """`function` of each tensor's schema index, results in the given order."""
        wanted = list(tensors)
        if self._pool is None:
            return [function(tensor) for tensor in wanted]
        by_size = sorted(wanted, key=lambda tensor: -self._sizes[tensor])
        futures = {tensor: self._pool.submit(function, tensor) for tensor in by_size}
        return [futures[tensor].result() for tensor in wanted]

    def beside(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Start `function` on another thread if there is one; returns how to get its result."""
        return function if self._pool is None else self._pool.submit(function).result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Stitch:
    """The codec as publisher and replica use it; both already hold the old weights' digests."""

    def __init__(self, encoding: str, before: DigestState, cores: int) -> None:
        self.name, self._before, self._threads = encoding, before, cores

    def encode(self, old: HostWeights, new: HostWeights) -> Files:
        encoder = PatchEncoder(
            old, new, before=self._before, encoding=self.name, threads=self._threads
        )
        return list(encoder.parts())

    def apply(self, files: Files, weights: HostWeights) -> None:
        update, _ = decode_parts(files, weights, self._before, threads=self._threads)
        update.apply(weights)


def stitch_encodings() -> list[str]:
    """Those that exist, and the choice among them."""
    names = [name for name in ENCODINGS if name != "dense"]
    return [*names, "auto", "dense"]


class Limit:
    """A plain pass over all weights; not a wire, its one figure stands for both directions."""

    def __init__(self, name: str, workers: Workers, target: HostWeights) -> None:
        self.name = name
        self._workers = workers
        self._target = arrays(target)

    def run(self, weights: HostWeights) -> None:
        if self.name == "digest":
            DigestState.of(weights, threads=self._workers.cores)
            return
        words = arrays(weights)

        def copy(tensor: int) -> None:
            np.copyto(self._target[tensor], words[tensor])

        def hashed(tensor: int) -> bytes:
            return xxhash.xxh3_128_digest(buffer(words[tensor]))

        self._workers.map(copy if self.name == "copy" else hashed, range(len(words)))


LIMITS = ("copy", "xxh3", "digest")
