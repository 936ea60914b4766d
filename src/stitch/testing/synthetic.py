"""Weights that change as a policy in training does: tiny steps, mostly absorbed by rounding."""

from __future__ import annotations

import numpy as np

from stitch.codec import TensorUpdate, UpdateSet
from stitch.codec.ulp import steps_between, take_steps
from stitch.codec.words import Words
from stitch.tensors.host import HostWeights
from stitch.types import FLOAT_DTYPES, Schema, TensorSpec

_MANTISSA_BITS = {
    "F64": 52, "F32": 23, "F16": 10, "BF16": 7,
    "F8_E5M2": 2, "F8_E4M3": 3, "F8_E4M3FNUZ": 3, "F8_E5M2FNUZ": 2,
}  # fmt: skip
_EXPONENT_BITS = {
    "F64": 11, "F32": 8, "F16": 5, "BF16": 8,
    "F8_E5M2": 5, "F8_E4M3": 4, "F8_E4M3FNUZ": 4, "F8_E5M2FNUZ": 5,
}  # fmt: skip


_MAX_EXPONENT = 60
"""Exponents are clipped to this, either way from the middle."""


def synthetic_schema(hidden: int = 64, layers: int = 2, dtype: str = "BF16") -> Schema:
    """A small transformer's tensor names and shapes; about `hidden` squared times 8 per layer."""
    specs = [
        TensorSpec.of("model.embed_tokens.weight", dtype, (8 * hidden, hidden)),
        TensorSpec.of("model.norm.weight", dtype, (hidden,)),
    ]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes = {
            "input_layernorm": (hidden,),
            "mlp.down_proj": (hidden, 2 * hidden + 3),
            "mlp.up_proj": (2 * hidden + 3, hidden),
            "self_attn.q_proj": (hidden, hidden),
        }
        specs += [
            TensorSpec.of(f"{prefix}.{name}.weight", dtype, shape) for name, shape in shapes.items()
        ]
    return Schema.of(specs)


def synthetic_weights(schema: Schema, seed: int = 0) -> HostWeights:
    """Normal values, with a scale of its own for each tensor; other dtypes get random bits."""
    rng = np.random.default_rng(seed)
    weights = HostWeights.allocate(schema)
    for index, spec in enumerate(schema.tensors):
        scale = float(10 ** rng.uniform(-2.5, -0.5))
        weights.words_at(index)[:] = _random_words(spec, scale, rng)
    return weights


def _random_words(spec: TensorSpec, scale: float, rng: np.random.Generator) -> Words:
    width = spec.word_bytes
    if spec.dtype not in FLOAT_DTYPES:
        data = rng.bytes(spec.num_bytes)
        return np.frombuffer(data, f"<u{width}")
    values = rng.normal(0.0, scale, spec.num_words)
    if spec.dtype == "F64":
        return values.view(np.uint64)
    if spec.dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    if spec.dtype == "F32":
        return bits
    if spec.dtype == "BF16":
        return (bits >> np.uint32(16)).astype(np.uint16)
    return _eight_bit(bits, spec.dtype)


def _eight_bit(bits: Words, dtype: str) -> Words:
    """Truncate float32 bits to an 8-bit float; what is out of its range becomes zero."""
    mantissa, exponent = _MANTISSA_BITS[dtype], _EXPONENT_BITS[dtype]
    rebased = ((bits >> 23) & 0xFF).astype(np.int64) - 127 + (1 << (exponent - 1)) - 1
    fits = (rebased > 0) & (rebased < (1 << exponent) - 1)
    sign = (bits >> 31) << 7
    word = sign | (rebased.astype(np.uint32) << mantissa)
    word |= (bits >> np.uint32(23 - mantissa)) & np.uint32((1 << mantissa) - 1)
    return np.where(fits, word, sign).astype(np.uint8)


def adam_step(weights: HostWeights, density: float, seed: int) -> UpdateSet:
    """Change about `density` of all words in place, like one absorbed optimizer step.

    A word changes with probability min(1, |step| / ULP) where |step| is nearly the same for all
    words and the ULP grows with the word's exponent, so small weights change most. Most changes
    are one ULP. Words of integer dtypes change with equal probability. Returns what changed.
    """
    rng = np.random.default_rng(seed)
    rate = _rate_for(density, weights)
    updates = []
    for index, spec in enumerate(weights.schema.tensors):
        words = weights.words_at(index)
        moved = rng.exponential(rate, words.size)
        moved *= np.exp2(-ulp_exponents(weights, index))
        count = (moved + rng.random(words.size)).astype(np.int64)
        positions = np.flatnonzero(count)
        if not positions.size:
            continue
        limit = (1 << (8 * spec.word_bytes - 1)) - 1
        steps = np.minimum(count[positions], min(limit, 1 << 40)) * rng.choice(
            (-1, 1), positions.size
        )
        old = words[positions]
        new = take_steps(old, steps.astype(f"<i{spec.word_bytes}"), spec.dtype)
        assert steps_between(old, new, spec.dtype).all()
        updates.append(TensorUpdate(tensor=index, positions=positions, new=new, old=old))
    update = UpdateSet(updates)
    update.apply(weights)
    return update


def ulp_exponents(weights: HostWeights, index: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """log2 of the spacing of values at each word (num_words,), up to a constant per dtype."""
    spec = weights.schema.tensors[index]
    words = weights.words_at(index)
    if spec.dtype not in FLOAT_DTYPES:
        return np.zeros(words.size, np.float32)
    mantissa, exponent = _MANTISSA_BITS[spec.dtype], _EXPONENT_BITS[spec.dtype]
    fields = (words >> words.dtype.type(mantissa)) & words.dtype.type((1 << exponent) - 1)
    centred = fields.astype(np.float32) - np.float32(1 << (exponent - 1))
    return np.clip(centred, -_MAX_EXPONENT, _MAX_EXPONENT, out=centred)


def _rate_for(density: float, weights: HostWeights) -> float:
    """The mean |step| at which `density` of all words is expected to change, by bisection."""
    counts = np.zeros(2 * _MAX_EXPONENT + 1, np.int64)
    for index in range(len(weights.schema)):
        rows = ulp_exponents(weights, index).astype(np.int64) + _MAX_EXPONENT
        counts += np.bincount(rows, minlength=counts.size)
    sizes = np.exp2(np.arange(-_MAX_EXPONENT, _MAX_EXPONENT + 1, dtype=np.float64))
    lo, hi = -200.0, 200.0
    for _ in range(40):
        middle = (lo + hi) / 2
        means = 2.0**middle / sizes
        # The mean of min(1, x) over exponential x of mean m is m (1 - exp(-1 / m)).
        expected = float((counts * means * -np.expm1(-1.0 / means)).sum())
        lo, hi = (middle, hi) if expected < density * counts.sum() else (lo, middle)
    return float(2.0**lo)
