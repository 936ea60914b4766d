"""What the codec benchmark measures on: steps of a real run, and synthetic steps of any density.

A synthetic step is what an optimizer does to the BF16 view of FP32 master weights. Masters are
normal, each matrix with a scale of its own, so they lie anywhere inside their BF16 cells; every
one moves by a learning rate times a normal number (as Adam moves it when gradients are mostly
noise); the view is rounded again. Most moves are absorbed, and small weights, whose cells are
narrow, change most. The learning rate is chosen so that the wanted share of the view changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stitch.tensors import HostWeights, open_checkpoint
from stitch.types import Schema, TensorSpec

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]

NUM_REAL_STEPS = 8
_SAMPLE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Step:
    """Weights before and after; `density` is the share of elements that changed."""

    name: str
    old: HostWeights
    new: HostWeights

    @property
    def num_bytes(self) -> int:
        return self.old.schema.num_bytes

    @property
    def num_changed(self) -> int:
        pairs = zip(arrays(self.old), arrays(self.new), strict=True)
        return sum(int(np.count_nonzero(old != new)) for old, new in pairs)

    @property
    def density(self) -> float:
        return self.num_changed / self.old.schema.num_elements


def arrays(weights: HostWeights) -> list[Words]:
    """Every tensor's words (num_words,), in schema order."""
    return [weights.words_at(index) for index in range(len(weights.schema))]


def copy_of(weights: HostWeights) -> HostWeights:
    return HostWeights.load(weights)


def percent(density: float) -> str:
    return f"{density * 100:g}%"


class Synthetic:
    """Masters and directions of a model of about `num_elements`, for steps of any size."""

    def __init__(self, num_elements: int, seed: int = 0) -> None:
        self.schema = llama_like(num_elements)
        self._rng = np.random.default_rng(seed)
        self._masters = [self._normal(spec, self._scale()) for spec in self.schema.tensors]
        self._directions = [self._normal(spec, 1.0) for spec in self.schema.tensors]
        self.old = HostWeights(self.schema, [to_bf16(masters) for masters in self._masters])

    def _scale(self) -> float:
        return float(10 ** self._rng.uniform(-2.2, -1.2))

    def _normal(self, spec: TensorSpec, scale: float) -> Floats:
        # Drawn in 64 bits: 32-bit normals lie on a grid near zero, where most changes happen.
        return (self._rng.standard_normal(spec.num_words) * scale).astype(np.float32)

    def step(self, density: float) -> Step:
        """One step that changes this share of all elements (to the precision of a sample)."""
        rate = self._rate_for(density)
        words = [
            to_bf16(masters + rate * directions)
            for masters, directions in zip(self._masters, self._directions, strict=True)
        ]
        name = f"synthetic {percent(density)}"
        return Step(name=name, old=self.old, new=HostWeights(self.schema, words))

    def _rate_for(self, density: float) -> np.float32:
        stride = max(1, self.schema.num_elements // _SAMPLE)
        masters = np.concatenate([array[::stride] for array in self._masters])
        directions = np.concatenate([array[::stride] for array in self._directions])
        before = to_bf16(masters)
        lo, hi = -60.0, 20.0
        for _ in range(26):
            middle = (lo + hi) / 2
            after = to_bf16(masters + np.float32(2.0**middle) * directions)
            reached = np.count_nonzero(before != after) >= density * before.size
            lo, hi = (lo, middle) if reached else (middle, hi)
        return np.float32(2.0**hi)


def to_bf16(values: Floats) -> Words:
    """Round to nearest, ties to even; for finite values."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def llama_like(num_elements: int) -> Schema:
    """A transformer's tensors: about a quarter embedding, the rest whole layers, at least one."""
    hidden = 1024 if num_elements >= 1 << 25 else 256 if num_elements >= 1 << 20 else 32
    inner = 11 * hidden // 4
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
    }
    layer = sum(int(np.prod(shape)) for shape in shapes.values())
    num_layers = max(1, round(0.75 * num_elements / layer))
    vocab = max(8, (num_elements - num_layers * layer) // hidden)
    specs = [
        TensorSpec.of(f"model.layers.{number}.{name}.weight", "BF16", shape)
        for number in range(num_layers)
        for name, shape in shapes.items()
    ]
    specs.append(TensorSpec.of("model.embed_tokens.weight", "BF16", (vocab, hidden)))
    specs.append(TensorSpec.of("model.norm.weight", "BF16", (hidden,)))
    return Schema.of(specs)


def real_folder(given: str | None) -> Path | None:
    """The folder of the real run: as given, or where it usually lies; None if it is nowhere."""
    place = given or os.environ.get("STITCH_REAL_DATA")
    if place:
        if not (Path(place) / "base.safetensors").exists():
            raise SystemExit(f"{place} has no base.safetensors")
        return Path(place)
    usual = Path(__file__).parents[2] / "shared" / "data" / "rl-smollm2"
    return usual if (usual / "base.safetensors").exists() else None


def real_steps(folder: Path) -> Iterator[Step]:
    """The run's optimizer steps, each starting where the one before ended."""
    with open_checkpoint(folder / "base.safetensors") as checkpoint:
        old = HostWeights.load(checkpoint)
    for number in range(1, NUM_REAL_STEPS + 1):
        new = copy_of(old)
        with np.load(folder / "adam1e6" / f"step{number:03}.npz") as changes:
            for name in new.schema.index:
                if f"{name}|index" in changes:
                    new.words(name)[changes[f"{name}|index"]] = changes[f"{name}|bits"]
        yield Step(name=f"real step {number}", old=old, new=new)
        old = new


def side_by_side(name: str, steps: Sequence[Step]) -> Step:
    """All steps as one step of one larger model, so that timing does not run from the cache."""
    return Step(
        name=name,
        old=_joined([step.old for step in steps]),
        new=_joined([step.new for step in steps]),
    )


def _joined(models: Sequence[HostWeights]) -> HostWeights:
    words = {}
    specs = []
    for number, model in enumerate(models):
        for spec, array in zip(model.schema.tensors, arrays(model), strict=True):
            name = f"part{number:02}.{spec.name}"
            specs.append(TensorSpec.of(name, spec.dtype, spec.shape))
            words[name] = array.copy()
    schema = Schema.of(specs)
    return HostWeights(schema, [words[spec.name] for spec in schema.tensors])
