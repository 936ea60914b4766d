"""A small random llama with a byte-level tokenizer, written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stitch.tensors import HostWeights, write_safetensors
from stitch.types import Schema, TensorSpec

HIDDEN, LAYERS, HEADS, INTERMEDIATE, CONTEXT = 64, 2, 2, 176, 1024
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tiny_model(directory: Path, seed: int = 0) -> Path:
    """A model directory that `transformers` loads; about 0.3 MB in BF16."""
    directory.mkdir(parents=True)
    vocab = byte_vocabulary()
    write_safetensors(directory / "model.safetensors", random_weights(len(vocab), seed))
    for name, content in {
        "config.json": _config(len(vocab)),
        "generation_config.json": {"eos_token_id": 0, "pad_token_id": 0},
        "tokenizer.json": _tokenizer(vocab),
        "tokenizer_config.json": _tokenizer_config(),
    }.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


def byte_vocabulary() -> dict[str, int]:
    """The special tokens, then one printable character per byte (the byte-level alphabet)."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in keep]
    letters = {byte: chr(byte) for byte in keep}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(moved)}
    return {name: at for at, name in enumerate([*SPECIAL, *(letters[b] for b in range(256))])}


def random_weights(vocab: int, seed: int) -> HostWeights:
    """BF16 weights: ones for norms, normal with deviation 0.02 for the rest."""
    schema = Schema.of(TensorSpec.of(name, "BF16", shape) for name, shape in _shapes(vocab))
    weights = HostWeights.allocate(schema)
    generator = np.random.default_rng(seed)
    for spec in schema.tensors:
        values = np.ones(spec.num_words, np.float32)
        if len(spec.shape) > 1:
            values = generator.normal(0.0, 0.02, spec.num_words).astype(np.float32)
        weights.words(spec.name)[:] = values.view(np.uint32) >> 16
    return weights


def _shapes(vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (vocab, HIDDEN)),
        ("model.norm.weight", (HIDDEN,)),
    ]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes += [(f"{at}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)) for name in "qkvo"]
        shapes += [
            (f"{at}mlp.{name}_proj.weight", (INTERMEDIATE, HIDDEN)) for name in ("gate", "up")
        ]
        shapes += [(f"{at}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE))]
        shapes += [
            (f"{at}{name}_layernorm.weight", (HIDDEN,)) for name in ("input", "post_attention")
        ]
    return shapes


def _config(vocab: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tokenizer(vocab: dict[str, int]) -> dict[str, object]:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": at, "content": name, "special": True, **special}
            for at, name in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
