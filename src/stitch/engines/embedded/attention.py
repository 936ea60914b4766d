"""Attention over rows of different lengths, with a key-value pool of our own.

A step packs the new tokens of all its rows into one sequence `[1, T]`. Everything but attention
treats tokens alone; attention is done here, one call per row over exactly that row's tokens. So
a row's numbers do not depend on who shares the step (docs/engines.md says how far that holds).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from stitch.errors import UsageError

IMPLEMENTATION = "stitch_rows"
"""The name under which transformers knows `attend`."""


@dataclass(frozen=True)
class Row:
    """Tokens `start` to `stop` of the packed sequence belong to `slot`, at `position` onwards.

    A row is a whole prompt (position 0) or one token.
    """

    slot: int
    start: int
    stop: int
    position: int


class KeyValuePool:
    """Keys and values of all slots: per layer two tensors [slots, kv heads, max_len, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_kv_heads, max_len, head_dim)
        # Not initialised on purpose: pages of unused slots are never touched.
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        for pool in (*self.keys, *self.values):
            pool[target, :, :length] = pool[source, :, :length]


class _Step(threading.local):
    """What the step under way on this thread attends over."""

    pool: KeyValuePool | None = None
    rows: tuple[Row, ...] = ()
    num_calls: int = 0


_step = _Step()


class Attending:
    """Context in which a forward pass on this thread uses `pool` and `rows`."""

    def __init__(self, pool: KeyValuePool, rows: tuple[Row, ...]) -> None:
        self._pool = pool
        self._rows = rows

    def __enter__(self) -> Attending:
        _step.pool, _step.rows, _step.num_calls = self._pool, self._rows, 0
        return self

    def __exit__(self, *_: object) -> None:
        _step.pool, _step.rows = None, ()

    @property
    def num_calls(self) -> int:
        """Attention layers that ran inside this context."""
        return _step.num_calls


def register() -> None:
    """Make `attend` known to transformers; may be called any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Tokens that belong to no row (padding of the step) attend to nothing and get zeros.
    """
    _refuse_variants(attention_mask, kwargs)
    pool = _step.pool
    if pool is None:
        raise UsageError("stitch_rows attention runs only inside a decoding step")
    _step.num_calls += 1
    layer = module.layer_idx
    keys, values = pool.keys[layer], pool.values[layer]
    out = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for row in _step.rows:
        new = slice(row.start, row.stop)
        end = row.position + row.stop - row.start
        keys[row.slot, :, row.position : end] = key[0, :, new]
        values[row.slot, :, row.position : end] = value[0, :, new]
        if row.stop - row.start == 1 and row.position:
            _attend_one(query, keys, values, out, row, scaling)
        else:
            _attend_prompt(query, key, value, out, new, scaling)
    return out, None


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    row: Row,
    scaling: float | None,
) -> None:
    """One token against its slot's tokens. Query heads that share a key head go as its queries."""
    num_heads, head_dim = query.shape[1], query.shape[3]
    num_kv_heads = keys.shape[1]
    grouped = query[:, :, row.start].reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = scaled_dot_product_attention(
        grouped,
        keys[row.slot : row.slot + 1, :, : row.position + 1],
        values[row.slot : row.slot + 1, :, : row.position + 1],
        scale=scaling,
    )
    out[:, row.start] = result.reshape(1, num_heads, head_dim)


def _attend_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    new: slice,
    scaling: float | None,
) -> None:
    groups = query.shape[1] // key.shape[1]
    result = scaled_dot_product_attention(
        query[:, :, new],
        key[:, :, new].repeat_interleave(groups, dim=1),
        value[:, :, new].repeat_interleave(groups, dim=1),
        is_causal=True,
        scale=scaling,
    )
    out[:, new] = result.transpose(1, 2)


def _refuse_variants(attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Attention that is not plain and causal must fail, not be computed wrongly."""
    wanted = {
        name: kwargs[name]
        for name in ("sliding_window", "softcap", "s_aux", "position_bias")
        if kwargs.get(name) is not None
    }
    if kwargs.get("dropout"):
        wanted["dropout"] = kwargs["dropout"]
    if attention_mask is not None:
        wanted["attention_mask"] = "given"
    if wanted:
        raise UsageError(f"the model asks for attention that this engine cannot do: {wanted}")
