"""The trainer's FP32 weights, and a digest of their BF16 view that shares no code path with the
publisher's snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stitch.codec import DigestState
from stitch.tensors import Words, word_dtype
from stitch.types import Schema

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
MAGNITUDE, EXPONENT, FRACTION = 0x7FFFFFFF, 0x7F800000, 0xFFFF


def load_model(directory: Path) -> tuple[Any, Any]:
    """FP32 model and tokenizer of a model directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def spread(parameters: Iterable[torch.Tensor], seed: int = 0) -> None:
    """Move every weight that is exactly a BF16 value to a random place inside its BF16 cell.

    Rounding gives the same BF16 bits as before. A model published in BF16 starts on the grid, a
    state that no long run is in: until the steps have spread the weights inside their cells, far
    fewer served values change than later on. Weights off the grid are left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        bits = parameter.detach().view(torch.int32)
        magnitude = bits & MAGNITUDE
        movable = (bits & FRACTION == 0) & (magnitude != 0) & (magnitude < EXPONENT)
        offset = torch.randint(-0x7FFF, 0x8000, bits.shape, generator=generator, dtype=torch.int32)
        bits.add_(torch.where(movable, offset, 0))


class CastReader:
    """A WeightReader over live tensors that casts each span with torch when it is read."""

    def __init__(self, state: Mapping[str, torch.Tensor], schema: Schema) -> None:
        self._state = state
        self._schema = schema

    @property
    def schema(self) -> Schema:
        return self._schema

    def read(self, name: str, start: int, stop: int) -> Words:
        spec = self._schema[name]
        part = self._state[name].detach().reshape(-1)[start:stop]
        cast = part.to(TORCH_DTYPES.get(spec.dtype, part.dtype)).contiguous()
        words: Words = cast.view(torch.uint8).numpy().view(word_dtype(spec))
        return words


def view_digest(model: Any, schema: Schema) -> str:
    """Version digest of the model's weights as `schema` would serve them: 32 hex digits."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return DigestState.of(CastReader(state, schema), threads=1).version_digest()
