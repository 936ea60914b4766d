"""Steps of training for the catch-up benchmark: simulated from any BF16 weights.

Adam on an FP32 master that starts anywhere inside its BF16 cells, as in a long run. A gradient is a
fresh normal number for every element and step, plus a constant part `DRIFT` times as large, so that
most of what changes in a step changes back in a later one and some of it stays. With these numbers
the share of elements that change in a step, its decline over the first steps, and how much less
eight steps at once change than one after the other are about those of the real run (`rl-smollm2`;
see `steps` of the benchmark), whose learning rate, betas and weight decay are used.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks._codec_data import Floats, Words, arrays, to_bf16
from stitch.tensors import HostWeights

LEARNING_RATE, BETA_1, BETA_2, WEIGHT_DECAY, EPSILON = 1e-6, 0.9, 0.95, 0.1, 1e-8
DRIFT = 0.3


class _Tensor:
    """Master, moments and the constant part of the gradient of one tensor's elements (n,)."""

    def __init__(self, words: Words, rng: np.random.Generator) -> None:
        self.master = _inside_cells(words, rng)
        self.mean = np.zeros(words.size, np.float32)
        self.square = np.zeros(words.size, np.float32)
        self.drift = rng.standard_normal(words.size, np.float32) * np.float32(DRIFT)

    def step(self, number: int, rng: np.random.Generator) -> Words:
        gradient = rng.standard_normal(self.mean.size, np.float32)
        gradient += self.drift
        self.mean += np.float32(1 - BETA_1) * (gradient - self.mean)
        gradient *= gradient
        self.square += np.float32(1 - BETA_2) * (gradient - self.square)
        scale = np.sqrt(self.square / np.float32(1 - BETA_2**number)) + np.float32(EPSILON)
        update = self.mean / np.float32(1 - BETA_1**number) / scale
        update += np.float32(WEIGHT_DECAY) * self.master
        self.master -= np.float32(LEARNING_RATE) * update
        return to_bf16(self.master)


def _inside_cells(words: Words, rng: np.random.Generator) -> Floats:
    """FP32 values (n,), each uniform among those that round to its BF16 word (n,)."""
    bits = words.astype(np.int64) << 16
    bits += rng.integers(-0x7FFF, 0x8000, words.size)
    outside = (bits ^ (words.astype(np.int64) << 16)) >> 31 != 0  # below zero's cell
    bits[outside] = words[outside].astype(np.int64) << 16
    return bits.astype(np.uint32).view(np.float32)


def training(start: HostWeights, num_steps: int, seed: int = 0) -> Iterator[HostWeights]:
    """The BF16 weights after each step; those before the first are `start`."""
    rng = np.random.default_rng(seed)
    tensors = [_Tensor(words, rng) for words in arrays(start)]
    for number in range(1, num_steps + 1):
        yield HostWeights(start.schema, [tensor.step(number, rng) for tensor in tensors])
