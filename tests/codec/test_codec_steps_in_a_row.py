"""Chains of real and of synthetic optimizer steps travel as patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from codec_cases import digest_of, same_bits

from stitch.codec import DigestState, PatchEncoder, UpdateSet, decode_parts, diff_update
from stitch.codec.ulp import steps_between
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights

Chain = tuple[HostWeights, Iterator[HostWeights]]
"""The first weights, and the weights after each step (one object, changed in place)."""


def real_steps(folder: Path) -> Chain:
    with open_checkpoint(folder / "base.safetensors") as checkpoint:
        weights = HostWeights.load(checkpoint)

    def steps(current: HostWeights) -> Iterator[HostWeights]:
        for path in sorted((folder / "adam1e6").glob("step*.npz")):
            with np.load(path) as step:
                for key in step.files:
                    name, kind = key.rsplit("|", 1)
                    if kind == "index":
                        current.words(name)[step[key]] = step[f"{name}|bits"]
            yield current

    return weights, steps(HostWeights.load(weights))


def synthetic_steps(dtype: str) -> Chain:
    weights = synthetic_weights(synthetic_schema(hidden=128, dtype=dtype), seed=4)

    def steps(current: HostWeights) -> Iterator[HostWeights]:
        for seed in range(8):
            adam_step(current, 0.007, seed)
            yield current

    return weights, steps(HostWeights.load(weights))


def travel(chain: Chain, encoding: str) -> tuple[list[float], int]:
    """Send each step; returns bytes per changed element of each, and how many steps there were."""
    mirror, steps = chain
    start = HostWeights.load(mirror)
    state = DigestState.of(mirror)
    costs: list[float] = []
    updates: list[UpdateSet] = []
    end = start
    for weights in steps:
        encoder = PatchEncoder(mirror, weights, before=state, encoding=encoding)
        parts = list(encoder.parts())
        update, state = decode_parts(parts, mirror, state)
        update.apply(mirror)
        assert same_bits(mirror, weights)
        assert state.version_digest() == encoder.after.version_digest()
        costs.append(encoder.stats.num_bytes / encoder.stats.num_changed)
        updates.append(update)
        end = weights
    assert state.version_digest() == digest_of(end)
    whole = UpdateSet.compose(updates)
    assert whole.num_changed == diff_update(start, end).num_changed
    whole.undo(mirror)
    assert same_bits(mirror, start)
    whole.apply(mirror)
    assert same_bits(mirror, end)
    for update in reversed(updates):
        update.undo(mirror)
    assert same_bits(mirror, start)
    return costs, len(updates)


REAL_LIMITS = {"auto": 1.0, "gaps": 1.85, "ranks": 1.0, "dense": 3.6}
"""Bytes per changed element, mean of the steps, whole patches with all headers."""


@pytest.mark.parametrize("encoding", REAL_LIMITS)
def test_eight_real_steps_travel(encoding: str, real_data: Path) -> None:
    costs, count = travel(real_steps(real_data), encoding)
    assert count == 8
    assert np.mean(costs) <= REAL_LIMITS[encoding]


def test_real_steps_take_a_third_of_xor_and_zstd(real_data: Path) -> None:
    mirror, steps = real_steps(real_data)
    compressor = zstandard.ZstdCompressor(level=1)
    ours = theirs = 0
    for weights in steps:
        ours += sum(map(len, PatchEncoder(mirror, weights, encoding="ranks").parts()))
        for index in range(len(mirror.schema)):
            old, new = mirror.words_at(index), weights.words_at(index)
            if not np.array_equal(old, new):
                theirs += len(compressor.compress(np.bitwise_xor(old, new).data))
            old[:] = new
    assert ours <= 0.34 * theirs


@pytest.mark.parametrize("encoding", ["auto", "gaps", "ranks", "dense"])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_eight_synthetic_steps_travel(dtype: str, encoding: str) -> None:
    costs, count = travel(synthetic_steps(dtype), encoding)
    assert count == 8
    assert max(costs) <= (3.6 if encoding == "dense" else 1.95)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E5M2", "F32", "F64", "I8"])
@pytest.mark.parametrize("density", [0.003, 0.05, 0.5])
def test_synthetic_steps_have_the_asked_density_and_mostly_single_steps(
    dtype: str, density: float
) -> None:
    weights = synthetic_weights(synthetic_schema(hidden=128, dtype=dtype))
    before = HostWeights.load(weights)
    update = adam_step(weights, density, seed=1)
    found = update.num_changed / weights.schema.num_elements
    assert 0.9 * density < found < 1.1 * density
    assert diff_update(before, weights).num_changed == update.num_changed
    steps = np.concatenate([steps_between(u.old, u.new, dtype) for u in update.updates])
    if density < 0.1:
        assert np.mean(np.abs(steps.astype(np.int64)) == 1) > 0.5


def test_synthetic_steps_are_the_same_for_the_same_seed() -> None:
    one, two = (synthetic_weights(synthetic_schema()) for _ in range(2))
    adam_step(one, 0.01, seed=5)
    adam_step(two, 0.01, seed=5)
    assert same_bits(one, two)
    adam_step(two, 0.01, seed=6)
    assert not same_bits(one, two)
