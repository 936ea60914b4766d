"""A tiny random llama as an ordinary Hugging Face directory, made without torch.

Its tokenizer maps every byte to one token (ids 0 to 255), so any text can be encoded and decoded;
three special tokens follow. `transformers` loads model and tokenizer offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stitch.errors import UsageError
from stitch.tensors import HostWeights, write_checkpoint
from stitch.types import Schema, TensorSpec

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
_SPECIAL = {BOS: 256, EOS: 257, PAD: 258}
_MIN_VOCAB = 259

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_checkpoint(
    directory: str | Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 512,
    tied: bool = True,
    dtype: str = "BF16",
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    max_positions: int = 2048,
) -> Path:
    """Write a random llama of the given sizes to `directory` and return it.

    `dtype` is BF16 or F32. Equal arguments give equal bytes. With `tied` the checkpoint has no
    `lm_head.weight`, as transformers writes tied models.
    """
    if vocab < _MIN_VOCAB or hidden % heads or heads % kv_heads:
        raise UsageError(
            f"tiny_checkpoint needs vocab >= {_MIN_VOCAB}, heads dividing hidden and kv_heads "
            f"dividing heads; got vocab={vocab}, hidden={hidden}, heads={heads}/{kv_heads}"
        )
    if dtype not in ("BF16", "F32"):
        raise UsageError(f"tiny_checkpoint writes BF16 or F32, not {dtype!r}")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _SPECIAL[BOS],
        "eos_token_id": _SPECIAL[EOS],
        "pad_token_id": _SPECIAL[PAD],
        "dtype": "bfloat16" if dtype == "BF16" else "float32",
    }
    shapes = dict(_shapes(config))
    weights = HostWeights.allocate(
        Schema.of(TensorSpec.of(name, dtype, shape) for name, shape in shapes.items())
    )
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        weights.words(name)[:] = _words(_values(rng, name, shape), dtype)
    target = Path(directory)
    write_checkpoint(target, weights)
    _write_json(target / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", tokens)
    _write_tokenizer(target)
    return target


def _shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    def number(key: str) -> int:
        return int(str(config[key]))

    hidden, wide = number("hidden_size"), number("intermediate_size")
    query = number("num_attention_heads") * number("head_dim")
    key_value = number("num_key_value_heads") * number("head_dim")
    yield "model.embed_tokens.weight", (number("vocab_size"), hidden)
    for layer in range(number("num_hidden_layers")):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (query, hidden)
        yield at + "self_attn.k_proj.weight", (key_value, hidden)
        yield at + "self_attn.v_proj.weight", (key_value, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, query)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (wide, hidden)
        yield at + "mlp.up_proj.weight", (wide, hidden)
        yield at + "mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (number("vocab_size"), hidden)


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms near 1; embeddings wide enough that seeds give clearly different outputs."""
    if len(shape) == 1:
        return (1 + 0.05 * rng.standard_normal(shape)).astype(np.float32)
    scale = 0.3 if "embed" in name or "lm_head" in name else shape[1] ** -0.5
    return (scale * rng.standard_normal(shape, np.float32)).astype(np.float32)


def _words(values: NDArray[np.float32], dtype: str) -> NDArray[np.unsignedinteger]:
    bits = values.reshape(-1).view(np.uint32)
    if dtype == "F32":
        return bits
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)  # round to nearest even


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE uses for each byte (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def _write_tokenizer(directory: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in _SPECIAL.items()
    ]
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
