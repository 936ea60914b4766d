"""Tiny checkpoints for real engines: tied, untied, and a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stitch.codec import TensorUpdate, UpdateSet
from stitch.tensors import HostWeights, open_checkpoint, write_checkpoint
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import Schema, TensorSpec

ODD_VOCAB = 1003
"""Not a multiple of 64: engines pad it."""


def make_model(kind: str, directory: Path) -> Path:
    """`tied`, `untied` or `moe`; heads of 32 as the CPU kernels want them."""
    tiny_checkpoint(directory, hidden=128, vocab=ODD_VOCAB, tied=kind == "tied", seed=5)
    if kind == "moe":
        _become_moe(directory)
    return directory


def _become_moe(directory: Path) -> None:
    """Replace weights and configuration by those of a small Qwen3-MoE; the tokenizer stays."""
    config = json.loads((directory / "config.json").read_text())
    hidden, experts, wide = config["hidden_size"], 4, 96
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": wide,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "use_sliding_window": False,
    }
    with open_checkpoint(directory) as checkpoint:
        dense = checkpoint.schema
    shapes = {spec.name: spec.shape for spec in dense.tensors if ".mlp." not in spec.name}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("q_norm", "k_norm"):
            shapes[f"{at}self_attn.{norm}.weight"] = (config["head_dim"],)
        shapes[at + "mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden))):
                shapes[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = shape
            shapes[f"{at}mlp.experts.{expert}.down_proj.weight"] = (hidden, wide)
    weights = HostWeights.allocate(
        Schema.of(TensorSpec.of(name, "BF16", shape) for name, shape in shapes.items())
    )
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        scale = 0.3 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5
        values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        if len(shape) == 1:
            values = np.float32(1) + np.float32(0.05) * values
        weights.words(name)[:] = (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    write_checkpoint(directory, weights, assets_from=directory, overwrite=True)
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: Path) -> HostWeights:
    with open_checkpoint(directory) as checkpoint:
        return HostWeights.load(checkpoint)


def save(weights: HostWeights, like: Path, directory: Path) -> Path:
    """A checkpoint with these weights and the configuration of another."""
    write_checkpoint(directory, weights, assets_from=like)
    return directory


def real_change(weights: HostWeights, seed: int, density: float = 0.05) -> UpdateSet:
    """Values change places inside each tensor: large changes of ordinary size."""
    rng = np.random.default_rng(seed)
    updates = []
    for index, spec in enumerate(weights.schema.tensors):
        words = weights.words_at(index)
        count = max(2, int(density * spec.num_words))
        positions = np.sort(rng.choice(spec.num_words, count, replace=False)).astype(np.int64)
        old = words[positions].copy()
        new = words[rng.permutation(positions)].copy()
        updates.append(TensorUpdate(tensor=index, positions=positions, new=new, old=old))
    return UpdateSet(updates)


def difference(there: HostWeights, here: HostWeights) -> UpdateSet:
    """The update that brings `here` to `there`."""
    updates = []
    for index in range(len(here.schema)):
        old, new = here.words_at(index), there.words_at(index)
        positions = np.flatnonzero(old != new).astype(np.int64)
        if positions.size:
            updates.append(
                TensorUpdate(
                    tensor=index, positions=positions, new=new[positions], old=old[positions]
                )
            )
    return UpdateSet(updates)
