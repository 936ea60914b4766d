"""Small models that keep their weights as inference engines do, with loaders of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.engines.placement.live import LiveTensors
from stitch.engines.ranks.agreement import Agreement
from stitch.engines.ranks.weights import RankWeights
from stitch.tensors import HostWeights
from stitch.tensors.device import DeviceWeights
from stitch.types import Schema, TensorSpec

Pairs = Iterable[tuple[str, torch.Tensor]]

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 203, 32, 48, 4, 2, 8
EXPERTS, EXPERT_INNER, LATENT = 4, 32, 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What an engine does with the weights."""

    world: int = 1
    tied: bool = True
    experts: bool = False
    repack: bool = False
    """Rows of the stacked experts are interleaved after loading."""
    transposed: bool = False
    """down_proj is kept transposed."""
    threads: bool = False
    joined: bool = False
    """gate and up are put together before they are copied."""
    latent: str = ""
    """Copies of kv_b outside the parameters: "copied", or "scaled", by more than copying."""
    wide_norms: bool = False
    """Norms are kept in float32."""
    scale: bool = False
    """The final norm is changed by the load."""


def checkpoint(
    layout: Layout, *, dtype: str = "BF16", seed: int = 0, head: bool = False
) -> HostWeights:
    """Random weights by their Hugging Face names. `head`: a tied head is shipped all the same."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "q_proj.weight": (HEADS * HEAD, HIDDEN),
        "k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "o_proj.weight": (HIDDEN, HEADS * HEAD),
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
    }
    if head or not layout.tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if layout.experts:
        for at in range(EXPERTS):
            shapes[f"experts.{at}.gate_proj.weight"] = (EXPERT_INNER, HIDDEN)
            shapes[f"experts.{at}.up_proj.weight"] = (EXPERT_INNER, HIDDEN)
            shapes[f"experts.{at}.down_proj.weight"] = (HIDDEN, EXPERT_INNER)
    if layout.latent:
        shapes["kv_b_proj.weight"] = (HEADS * 2 * HEAD, LATENT)
    weights = HostWeights.allocate(
        Schema.of(TensorSpec.of(name, dtype, shape) for name, shape in shapes.items())
    )
    rng = np.random.default_rng(seed)
    for spec in weights.schema.tensors:
        values = torch.from_numpy(rng.standard_normal(spec.num_words).astype(np.float32))
        if dtype == "BF16":
            values = values.to(torch.bfloat16).view(torch.int16)
        else:
            values = values.view(torch.int32)
        weights.words(spec.name)[:] = values.numpy().view(weights.words(spec.name).dtype)
    if head and layout.tied:
        weights.words("lm_head.weight")[:] = weights.words("embed.weight")
    return weights


def pairs(weights: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) as a checkpoint's files give them."""
    kinds = {"BF16": (torch.int16, torch.bfloat16), "F32": (torch.int32, torch.float32)}
    found = []
    for spec in weights.schema.tensors:
        bits, dtype = kinds[spec.dtype]
        words = np.array(weights.read(spec.name, 0, spec.num_words)).view(f"i{spec.word_bytes}")
        assert torch.from_numpy(words).dtype == bits
        found.append((spec.name, torch.from_numpy(words).view(dtype).view(spec.shape)))
    return found


class Helper:
    """An object that a module keeps, with tensors of its own."""

    def __init__(self) -> None:
        self.tables: dict[str, torch.Tensor] = {}


class ShardedModel(torch.nn.Module):
    """One rank's share. The loader takes checkpoint names and puts parts where they belong."""

    def __init__(self, layout: Layout, rank: int = 0) -> None:
        super().__init__()
        self.layout, self.rank, world = layout, rank, layout.world
        bf16 = torch.bfloat16

        def parameter(*shape: int, dtype: torch.dtype = bf16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

        self.padded = -(-VOCAB // 64) * 64
        self.embed = parameter(self.padded // world, HIDDEN)
        self.lm_head = self.embed if layout.tied else parameter(self.padded // world, HIDDEN)
        self.norm = parameter(HIDDEN, dtype=torch.float32 if layout.wide_norms else bf16)
        self.kv_local = max(1, KV_HEADS // world)
        self.q_local = HEADS // world
        self.qkv = parameter((self.q_local + 2 * self.kv_local) * HEAD, HIDDEN)
        self.o = parameter(HIDDEN, self.q_local * HEAD)
        self.gate_up = parameter(2 * INNER // world, HIDDEN)
        down = (INNER // world, HIDDEN) if layout.transposed else (HIDDEN, INNER // world)
        self.down = parameter(*down)
        self.register_buffer("table", torch.rand(64))
        if layout.experts:
            self.w13 = parameter(EXPERTS, 2 * EXPERT_INNER // world, HIDDEN)
            self.w2 = parameter(EXPERTS, HIDDEN, EXPERT_INNER // world)
        if layout.latent:
            self.kv_b = parameter(self.q_local * 2 * HEAD, LATENT)
            self.helper = Helper()
            self.w_kc: torch.Tensor | None = None
        self.loaded: set[str] = set()

    # --- the engine's own loader ----------------------------------------------------------------

    def load_weights(self, weights: Pairs) -> set[str]:
        if self.layout.threads:
            with ThreadPoolExecutor(2) as pool:
                jobs = [pool.submit(self._load, name, tensor) for name, tensor in weights]
                for job in jobs:
                    job.result()
        else:
            held: dict[str, torch.Tensor] = {}
            for name, tensor in weights:
                if self.layout.joined and name in ("gate_proj.weight", "up_proj.weight"):
                    held[name] = tensor
                else:
                    self._load(name, tensor)
            if held:
                parts = [
                    held[f"{half}_proj.weight"].chunk(self.layout.world)[self.rank]
                    for half in ("gate", "up")
                ]
                self.gate_up.data.copy_(torch.cat(parts))
        if self.layout.latent:
            self._derive()
        if self.layout.scale:
            self.norm.data.copy_(self.norm.data * 2)
        self.loaded.add("all")
        return self.loaded

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith("experts."):
            self._load_expert(name, tensor)
            return
        rank, world = self.rank, self.layout.world
        kind = name.removesuffix(".weight")
        if kind == "lm_head" and self.layout.tied:
            return
        if kind in ("embed", "lm_head"):
            target = getattr(self, kind).data
            first = rank * target.shape[0]
            part = tensor[first : first + target.shape[0]]
            target[: part.shape[0]].copy_(part)
            target[part.shape[0] :].fill_(0)
        elif kind == "norm":
            self.norm.data.copy_(tensor)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            heads = self.q_local if kind == "q_proj" else self.kv_local
            start = {"q_proj": 0, "k_proj": self.q_local, "v_proj": self.q_local + self.kv_local}[
                kind
            ]
            shard = rank if kind == "q_proj" else rank * KV_HEADS // max(world, KV_HEADS)
            if kind != "q_proj" and world <= KV_HEADS:
                shard = rank
            part = tensor.narrow(0, shard * heads * HEAD, heads * HEAD)
            self.qkv.data.narrow(0, start * HEAD, heads * HEAD).copy_(part)
        elif kind == "o_proj":
            width = self.o.shape[1]
            self.o.data.copy_(tensor.narrow(1, rank * width, width))
        elif kind in ("gate_proj", "up_proj"):
            rows = INNER // world
            self.gate_up.data[rows * (kind == "up_proj") :][:rows] = tensor[
                rank * rows : (rank + 1) * rows
            ]
        elif kind == "down_proj":
            width = INNER // world
            part = tensor.narrow(1, rank * width, width)
            self.down.data.copy_(part.t() if self.layout.transposed else part)
        elif kind == "kv_b_proj":
            rows = self.kv_b.shape[0]
            self.kv_b.data.copy_(tensor[rank * rows : (rank + 1) * rows])
        else:
            raise KeyError(name)

    def _load_expert(self, name: str, tensor: torch.Tensor) -> None:
        _, number, kind, _ = name.split(".")
        expert, rank, world = int(number), self.rank, self.layout.world
        rows = EXPERT_INNER // world
        if kind == "down_proj":
            self.w2.data[expert].copy_(tensor[:, rank * rows : (rank + 1) * rows])
        else:
            start = rows * (kind == "up_proj")
            self.w13.data[expert, start : start + rows].copy_(
                tensor[rank * rows : (rank + 1) * rows]
            )

    def _derive(self) -> None:
        """As SGLang's MLA: halves of kv_b, one transposed, outside the parameters."""
        key, value = self.kv_b.data.unflatten(0, (self.q_local, 2 * HEAD)).split(HEAD, dim=1)
        if self.layout.latent == "scaled":
            key = key * 3
        if self.w_kc is None:
            self.w_kc = key.transpose(1, 2).contiguous()
            self.helper.tables["w_vc"] = value.contiguous()
        else:
            self.w_kc.copy_(key.transpose(1, 2).contiguous())
            self.helper.tables["w_vc"].copy_(value.contiguous())

    def process_after_loading(self) -> None:
        """As vLLM on a CPU: interleave the rows of the stacked experts, 16 at a time."""
        if self.layout.repack:
            for weight in (self.w13, self.w2):
                e, n, k = weight.shape
                packed = weight.data.view(e, n // 16, 16, k).transpose(2, 3).contiguous()
                weight.data.copy_(packed.view(e, n, k))


def built(layout: Layout, rank: int, weights: Pairs) -> ShardedModel:
    model = ShardedModel(layout, rank)
    with torch.no_grad():
        model.load_weights(weights)
        model.process_after_loading()
    return model


class Ranks:
    """All ranks of one model, in this process, learned and settled."""

    def __init__(self, layout: Layout, reader: Any, *, build: bool = True, **options: Any) -> None:
        self.layout = layout
        self.models = [built(layout, rank, pairs(reader)) for rank in range(layout.world)]
        self.ranks = [
            RankWeights(
                model,
                reader.schema,
                rank=rank,
                world=layout.world,
                load=model.load_weights,
                reader=reader,
                build=(lambda weights, rank=rank: built(layout, rank, weights)) if build else None,
                **options,
            )
            for rank, model in enumerate(self.models)
        ]
        self.schema = reader.schema
        self.agreement = Agreement.of(self.schema, self.call("learn"))
        assert all(a["ok"] for a in self.call("settle", self.agreement.settlement))

    def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def digest(self, names: Sequence[str] | None = None) -> DigestState:
        return self.agreement.combine(self.call("lanes", names), names)

    def stage(self, stage_id: str, update: UpdateSet) -> list[dict[str, Any]]:
        answers = self.call("stage_part", stage_id, 0, update.to_bytes(self.schema))
        if all(a["ok"] for a in answers):
            answers = self.call("seal", stage_id, 1, update.num_changed)
        return answers


def live_bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all live storages, and of tensors beside them."""
    bits = {s.key: s.words.clone() for s in LiveTensors(model)}
    bits.pop("table")
    if getattr(model, "w_kc", None) is not None:
        bits["w_kc"] = model.w_kc.clone().view(torch.int16)
        bits["w_vc"] = model.helper.tables["w_vc"].clone().view(torch.int16)
    return bits


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def random_update(
    weights: Any, seed: int, share: float = 0.05, names: Iterable[str] = ()
) -> UpdateSet:
    """Random new words, special values among them, at random places of some tensors."""
    rng = np.random.default_rng(seed)
    updates = []
    chosen = set(names) or {s.name for s in weights.schema.tensors if rng.random() < 0.7}
    for tensor, spec in enumerate(weights.schema.tensors):
        if spec.name not in chosen:
            continue
        held = np.array(weights.read(spec.name, 0, spec.num_words))
        if rng.random() < 0.2 and not names:
            lo = int(rng.integers(0, spec.num_words))
            hi = int(rng.integers(lo, spec.num_words)) + 1
            positions, old, start = None, held[lo:hi], lo
        else:
            count = max(1, int(share * spec.num_words))
            positions = np.sort(rng.choice(spec.num_words, count, replace=False)).astype(np.int64)
            old, start = held[positions], 0
        new = rng.integers(0, 1 << (8 * spec.word_bytes), old.size, dtype=np.uint64).astype(
            old.dtype
        )
        updates.append(
            TensorUpdate(tensor=tensor, positions=positions, start=start, new=new, old=old)
        )
    return UpdateSet(updates)


def device_weights(weights: HostWeights) -> DeviceWeights:
    return DeviceWeights.load(weights, "cpu")


Change = Callable[[HostWeights], UpdateSet]
