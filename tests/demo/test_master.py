"""The trainer's FP32 weights against the BF16 base they start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stitch.codec import DigestState
from stitch.demo.master import spread, view_digest
from stitch.tensors import open_checkpoint


def all_bf16() -> torch.Tensor:
    """Every BF16 bit pattern as FP32, without NaNs."""
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    values = bits.view(torch.float32)
    return values[~values.isnan()]


def test_spreading_keeps_the_bf16_bits_of_every_value() -> None:
    values = all_bf16()
    moved = values.clone()
    spread([moved])
    rounded = moved.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(rounded, values.to(torch.bfloat16).view(torch.int16))


def test_spreading_moves_finite_values_off_the_grid_and_nothing_else() -> None:
    values = torch.cat([all_bf16(), torch.tensor([0.1, 1e-3])])
    moved = values.clone()
    spread([moved])
    still = moved == values
    assert still[-2:].all()
    assert still[values == 0].all()
    assert still[values.isinf()].all()
    assert still[:-2].float().mean() < 0.01


def test_spreading_covers_the_cell_evenly() -> None:
    values = torch.full((20_000,), 1.5)
    spread([values])
    offsets = (values.view(torch.int32) & 0xFFFF).float()
    assert (values > 1.5).float().mean().item() > 0.45
    assert (values < 1.5).float().mean().item() > 0.45
    assert offsets.unique().numel() > 15_000


def test_the_digest_of_the_spread_weights_is_the_bases(
    tiny: tuple[Any, Any], tiny_dir: Path
) -> None:
    model, _ = tiny
    spread(model.parameters())
    with open_checkpoint(tiny_dir) as base:
        expected = DigestState.of(base).version_digest()
        assert view_digest(model, base.schema) == expected
        with torch.no_grad():
            model.model.norm.weight[3] *= 1.1
        assert view_digest(model, base.schema) != expected
