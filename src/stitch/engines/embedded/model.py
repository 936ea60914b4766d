"""Loading a model, and refusing those that the row-wise attention would not serve exactly."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stitch.engines.embedded.attention import IMPLEMENTATION, Attending, KeyValuePool, Row, register
from stitch.engines.embedded.weights import LiveWeights
from stitch.errors import UsageError
from stitch.tensors import open_checkpoint
from stitch.types import Schema
from stitch.views import view_schema

MIN_ROWS = 4
"""Fewer rows make CPU matrix products take another path whose rounding differs (f32)."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the key-value pool and the request checks need to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to decode. `tokenizer` is for requests, `decoder` for the decode thread."""

    model: Any
    tokenizer: Any
    decoder: Any
    weights: LiveWeights
    geometry: Geometry
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def new_pool(self, num_slots: int, max_len: int) -> KeyValuePool:
        return KeyValuePool(
            num_layers=self.geometry.num_layers,
            num_slots=num_slots,
            num_kv_heads=self.geometry.num_kv_heads,
            max_len=max_len,
            head_dim=self.geometry.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self, pool: KeyValuePool, rows: tuple[Row, ...], tokens: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Logits [len(rows), vocab] of each row's last token; fills the rows' keys and values."""
        padding = max(0, MIN_ROWS - len(tokens))
        last = [row.stop - 1 for row in rows]
        last += [last[0]] * max(0, MIN_ROWS - len(rows))

        def on_device(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)

        with torch.inference_mode(), Attending(pool, rows) as step:
            logits = self.model(
                input_ids=on_device(tokens + [0] * padding)[None],
                position_ids=on_device(positions + [0] * padding)[None],
                use_cache=False,
                logits_to_keep=on_device(last),
            ).logits
            if step.num_calls != self.geometry.num_layers:
                raise UsageError(
                    f"the model ran {step.num_calls} attention layers of ours, it has "
                    f"{self.geometry.num_layers}: some layers are of another kind"
                )
        result: torch.Tensor = logits[0, : len(rows)]
        return result


def load_model(
    directory: str | Path, *, dtype: str = "auto", device: str = "cpu", view: str = "bf16"
) -> LoadedModel:
    """Load a checkpoint directory for serving.

    `view` names what is served: `bf16` or `checkpoint` (every tensor as stored). `dtype` is what
    the model computes in: bfloat16, float32, or auto for the faster one that can hold the view.
    Raises UsageError for a model that cannot be served exactly, SchemaMismatchError when
    checkpoint and model disagree on tensors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    register()
    config = AutoConfig.from_pretrained(directory)
    _refuse(config)
    with open_checkpoint(directory) as checkpoint:
        schema = view_schema(checkpoint.schema, view)
    torch_dtype = _compute_dtype(dtype, schema, torch.device(device))
    # Rounding to the view comes first; widening what was rounded is exact.
    stored = torch.bfloat16 if view == "bf16" else torch_dtype
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=stored)
    if not getattr(model, "_supports_attention_backend", False):
        raise UsageError(f"{type(model).__name__} does not support a custom attention function")
    model.set_attn_implementation(IMPLEMENTATION)
    model.to(device=device, dtype=torch_dtype).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        # Fast tokenizers may not be used by two threads at a time.
        decoder=copy.deepcopy(tokenizer),
        weights=LiveWeights.of(model, schema),
        geometry=_geometry(model),
        eos_ids=_eos_ids(model, tokenizer),
        dtype=torch_dtype,
        device=torch.device(device),
    )
    _probe(loaded)
    return loaded


def _compute_dtype(dtype: str, schema: Schema, device: torch.device) -> torch.dtype:
    """The torch dtype that `dtype` means for this view on this device."""
    if dtype not in ("auto", "bfloat16", "float32"):
        raise UsageError(f"dtype must be auto, bfloat16 or float32, got {dtype!r}")
    if dtype != "auto":
        return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    if any(spec.dtype == "F32" for spec in schema.tensors):
        return torch.float32
    # Without its BF16 kernels a CPU multiplies BF16 six times slower than float32.
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def _refuse(config: Any) -> None:
    """UsageError for architectures whose attention is more than plain and causal."""
    problems = []
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        problems.append("it is not a decoder")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        problems.append(f"sliding window of {config.sliding_window} tokens")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        problems.append(f"layers of kind {', '.join(sorted(kinds))}")
    if getattr(config, "attn_logit_softcapping", None):
        problems.append("softcap on attention logits")
    if problems:
        raise UsageError(
            f"model type {config.model_type!r} cannot be served exactly: {'; '.join(problems)}"
        )


def _geometry(model: Any) -> Geometry:
    config = model.config
    heads = config.num_attention_heads
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _probe(loaded: LoadedModel) -> None:
    """Run one prompt and one token: a model that needs other attention fails here, not later."""
    pool = loaded.new_pool(num_slots=1, max_len=4)
    loaded.forward(pool, (Row(0, 0, 3, 0),), [0, 1, 2], [0, 1, 2])
    loaded.forward(pool, (Row(0, 0, 1, 3),), [3], [3])
