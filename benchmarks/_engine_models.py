"""The checkpoints that the engine benchmark serves, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._codec_data import real_steps
from stitch.codec import TensorUpdate, UpdateSet
from stitch.tensors import HostWeights, open_checkpoint, write_checkpoint
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import Schema, TensorSpec

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 151936, 1024, 3072, 28, 16, 8, 128
"""Qwen3-0.6B's: 596 million parameters, the output layer tied to the embedding."""
_PIECE = 1 << 22


def write_qwen(directory: Path, *, layers: int = LAYERS, vocab: int = VOCAB) -> HostWeights:
    """A checkpoint of Qwen3-0.6B's shape with random weights; returns them."""
    shapes = _qwen_shapes(layers, vocab)
    specs = [TensorSpec.of(name, "BF16", shape) for name, shape in shapes.items()]
    weights = HostWeights.allocate(Schema.of(specs))
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        words = weights.words(name)
        for lo in range(0, words.size, _PIECE):
            values = rng.standard_normal(min(_PIECE, words.size - lo), np.float32)
            values *= 0.1 if len(shape) == 1 else shape[1] ** -0.5
            values += len(shape) == 1
            words[lo : lo + values.size] = values.view(np.uint32) >> np.uint32(16)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
    }
    _save(directory, weights, config)
    return weights


def _qwen_shapes(layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
            at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            at + "self_attn.q_norm.weight": (HEAD_DIM,),
            at + "self_attn.k_norm.weight": (HEAD_DIM,),
            at + "mlp.gate_proj.weight": (INNER, HIDDEN),
            at + "mlp.up_proj.weight": (INNER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes


def random_update(weights: HostWeights, density: float, seed: int, *, large: bool) -> UpdateSet:
    """Changes at random places of every tensor.

    To the neighbouring BF16 value, as training steps change them; or, if `large`, the changed
    values change places, so that the model answers differently.
    """
    rng = np.random.default_rng(seed)
    updates = []
    for index, spec in enumerate(weights.schema.tensors):
        gaps = rng.geometric(density, int(1.1 * density * spec.num_words) + 64)
        positions = np.cumsum(gaps) - 1
        positions = positions[: int(np.searchsorted(positions, spec.num_words))]
        if not positions.size:
            continue
        old = weights.words_at(index)[positions]
        new = rng.permutation(old) if large else old ^ np.uint16(1)
        updates.append(TensorUpdate(tensor=index, positions=positions, new=new, old=old))
    return UpdateSet(updates)


def inverse(update: UpdateSet) -> UpdateSet:
    """The update that takes this one back."""
    return UpdateSet(
        [
            TensorUpdate(
                tensor=u.tensor, positions=u.positions, start=u.start, new=u.old, old=u.new
            )
            for u in update.updates
        ]
    )


def write_real(directory: Path, data: Path) -> tuple[HostWeights, Iterator[UpdateSet]]:
    """The slice of SmolLM2 in `data` as a model of three layers, and its optimizer steps."""
    with open_checkpoint(data / "base.safetensors") as checkpoint:
        names = _renamed(checkpoint.schema)
        base = HostWeights.load(checkpoint)
    weights = _under(names, base)
    rows, hidden = weights.schema["model.embed_tokens.weight"].shape
    inner, _ = weights.schema["model.layers.0.mlp.gate_proj.weight"].shape
    key_value, _ = weights.schema["model.layers.0.self_attn.k_proj.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": key_value // 64,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    }
    _save(directory, weights, config)
    return weights, _real_updates(data, names)


def _real_updates(data: Path, names: dict[str, str]) -> Iterator[UpdateSet]:
    for step in real_steps(data):
        old, new = _under(names, step.old), _under(names, step.new)
        updates = []
        for index in range(len(old.schema)):
            here, there = old.words_at(index), new.words_at(index)
            at = np.flatnonzero(here != there).astype(np.int64)
            if at.size:
                updates.append(
                    TensorUpdate(tensor=index, positions=at, new=there[at], old=here[at])
                )
        yield UpdateSet(updates)


def _renamed(schema: Schema) -> dict[str, str]:
    """Name in the slice -> name in the model: the layers that are there, numbered from 0."""
    layers = sorted({int(s.name.split(".")[2]) for s in schema.tensors if ".layers." in s.name})
    names = {}
    for spec in schema.tensors:
        parts = spec.name.split(".")
        if ".layers." in spec.name:
            parts[2] = str(layers.index(int(parts[2])))
        names[spec.name] = ".".join(parts)
    return names


def _under(names: dict[str, str], weights: HostWeights) -> HostWeights:
    """The same words under other names."""
    old = weights.schema
    schema = Schema.of(TensorSpec.of(names[s.name], s.dtype, s.shape) for s in old.tensors)
    back = {new: name for name, new in names.items()}
    return HostWeights(schema, [weights.words(back[spec.name]) for spec in schema.tensors])


def _save(directory: Path, weights: HostWeights, config: dict[str, Any]) -> None:
    """Write a checkpoint with the tokenizer of bytes."""
    small = tiny_checkpoint(directory.with_name(f"{directory.name}-tokenizer"))
    common = json.loads((small / "config.json").read_text())
    write_checkpoint(directory, weights, assets_from=small)
    tokens = {key: common[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    more = {"dtype": "bfloat16", "max_position_embeddings": 2048, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps({**tokens, **more, **config}))
