"""Stock engines in miniature: they load directories, report checksums and answer prompts.

What a ToyEngine answers depends on every tensor, and tokens that change roles in embedding and head
change roles in its answers, as with real models. `faults` makes it fail as real engines were seen
to (docs/engines.md, "Stock engines").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from stitch.codec import DigestState
from stitch.engines.reload.answers import NUM_TOKENS, Answer, Step, checked
from stitch.engines.reload.checksums import Checksums
from stitch.engines.reload.recipes import Parameter
from stitch.engines.reload.stock import StockLostError, StockRefusedError, StockTraits
from stitch.tensors import HostWeights, open_checkpoint
from stitch.tensors.reader import read_all
from stitch.testing.tiny import tiny_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def small_model(directory: Path, *, tied: bool = False, seed: int = 3) -> Path:
    return tiny_checkpoint(
        directory, hidden=16, layers=1, heads=2, kv_heads=1, vocab=301, tied=tied, seed=seed
    )


def load(directory: Path) -> HostWeights:
    with open_checkpoint(directory) as checkpoint:
        return HostWeights.load(checkpoint)


def digest_of(weights: HostWeights) -> str:
    return DigestState.of(weights).version_digest()


@dataclass
class ToyFaults:
    """Switches; numbers count down."""

    refuse_loads: int = 0
    """So many loads leave half of the new weights and report a failure."""
    mix: bool = False
    """Loads leave out a tensor and report success."""
    lose_load: bool = False
    """The next load is done and its answer lost."""
    stale_head: bool = False
    """The output head that was loaded first is what is computed with, ever after."""
    packed: bool = False
    """Parameters of linear layers are empty: copies are computed with."""
    odd_hash: bool = False
    """Checksums are of a kind of its own."""
    refuse_pauses: int = 0
    stay_paused: bool = False
    keep_cache: bool = False
    not_finite: bool = False
    """Answers are made of NaN."""


class ToyEngine:
    """One engine process; `restart` makes it another one."""

    def __init__(self, directory: Path, *, ranks: int = 1) -> None:
        self.directory, self.ranks = directory, ranks
        self.faults = ToyFaults()
        self.calls: list[str] = []
        self.settings: dict[str, Any] = {}
        """What it says of its configuration, beyond the usual."""
        self.restart()

    def restart(self) -> None:
        self.weights = load(self.directory)
        self.head = self.weights.words(self._head).copy()
        self.label, self.paused = "default", False

    @property
    def _head(self) -> str:
        return HEAD if HEAD in self.weights.schema else EMBEDDING

    def load(self, directory: Path, label: str) -> bool:
        """Whether it says that it did it."""
        assert self.paused, "loaded while requests run"
        new = load(directory)
        names = list(new.schema.index)
        failing = self.faults.refuse_loads > 0
        if failing:
            self.faults.refuse_loads -= 1
            names = names[: len(names) // 2]
        elif self.faults.mix:
            names.remove("model.layers.0.mlp.up_proj.weight")
        for name in names:
            self.weights.words(name)[:] = new.words(name)
        if not self.faults.stale_head:
            self.head = self.weights.words(self._head).copy()
        if not failing:
            self.label = label
        return not failing

    def checksums(self) -> Iterator[tuple[int, str, str]]:
        """(rank, runtime name, hex digits)."""
        for rank in range(self.ranks):
            for name, parts in _runtime(list(self.weights.schema.index)).items():
                linear = "_proj" in name
                data = b"".join(self._shard(part, rank, axis) for part, axis in parts)
                if self.faults.packed and linear:
                    data = b""
                if self.faults.odd_hash:
                    data = data[::-1]
                yield rank, name, hashlib.sha256(data).hexdigest()

    def _shard(self, name: str, rank: int, axis: int | None) -> bytes:
        spec = self.weights.schema[name]
        words = read_all(self.weights, name).reshape(spec.shape)
        if self.ranks == 1 or axis is None:
            if "embed_tokens" in name or name == HEAD:
                words = np.pad(words, ((0, -len(words) % 64), (0, 0)))
            return words.tobytes()
        if "embed_tokens" in name or name == HEAD:
            words = np.pad(words, ((0, -len(words) % (64 * self.ranks)), (0, 0)))
        if spec.shape[axis] % self.ranks and "_proj" in name:
            return words.tobytes()
        if any(kind in name for kind in ("k_proj", "v_proj")):  # one head: all have it
            return words.tobytes()
        return np.array_split(words, self.ranks, axis)[rank].tobytes()

    def answer(self, prompt: Sequence[int]) -> list[tuple[int, float, float]]:
        """(token, log probability, that of the next likely one), greedily."""
        assert not self.paused, "asked while paused"
        embedding = _floats(self.weights.words(EMBEDDING), 16)
        head = _floats(self.head, 16)
        mood = np.ones(16)
        for spec in self.weights.schema.tensors:
            if spec.name not in (EMBEDDING, HEAD):
                data = self.weights.words(spec.name).tobytes()
                seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
                mood *= np.random.default_rng(seed).uniform(0.7, 1.4, 16)
        tokens, out = list(prompt), []
        for _ in range(NUM_TOKENS):
            state = sum(embedding[token] * 0.7**at for at, token in enumerate(reversed(tokens)))
            logits = 20 * head @ (state * mood)
            logprobs = logits - logits.max()
            logprobs -= math.log(np.exp(logprobs).sum())
            second, first = np.argsort(logprobs, kind="stable")[-2:]
            value = math.nan if self.faults.not_finite else float(logprobs[first])
            out.append((int(first), value, float(logprobs[second])))
            tokens.append(int(first))
        return out


def _runtime(names: Sequence[str]) -> dict[str, list[tuple[str, int | None]]]:
    """Parameters as engines name them -> their checkpoint tensors and the axis of shards."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    for name in names:
        runtime = name
        for fused, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("gate_up_proj", ("gate_proj", "up_proj")),
        ):
            for part in parts:
                runtime = runtime.replace(f".{part}.", f".{fused}.")
        axis = None if "norm" in name else 1 if "o_proj" in name or "down_proj" in name else 0
        found.setdefault(runtime, []).append((name, axis))
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for parts in found.values():
        parts.sort(key=lambda part: next((i for i, o in enumerate(order) if o in part[0]), 9))
    return found


def _floats(words: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    return (words.astype(np.uint32) << 16).view(np.float32).reshape(-1, width).astype(float)


@dataclass
class MemoryStock:
    """A StockEngine around a ToyEngine, without HTTP."""

    toy: ToyEngine
    retries: bool = True
    traits: StockTraits = field(
        default=StockTraits(engine="toy", salt_field="cache_salt", blocked_routes=("/pause",))
    )

    async def check_setup(self) -> None:
        return None

    async def label(self) -> str:
        return self.toy.label

    async def set_label(self, label: str) -> None:
        self.toy.label = label

    async def pause(self) -> None:
        self.toy.paused = True

    async def resume(self) -> None:
        self.toy.paused = False

    async def load(self, directory: str, label: str) -> None:
        if not self.toy.load(Path(directory), label):
            raise StockRefusedError("planned")
        if self.toy.faults.lose_load:
            raise StockLostError("planned")

    async def checksums(self) -> Checksums:
        ranks = self.toy.ranks
        return {
            Parameter(name=name, rank=rank, ranks=ranks): value
            for rank, name, value in self.toy.checksums()
        }

    async def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[Answer, ...]:
        found = [
            tuple(Step(token=t, logprob=p, lead=p - q) for t, p, q in self.toy.answer(prompt))
            for prompt in prompts
        ]
        return checked(found, len(prompts))

    def may_retry(self, error: Exception) -> bool:
        return self.retries and not isinstance(error, StockLostError)

    async def close(self) -> None:
        return None


def vllm_app(toy: ToyEngine) -> web.Application:
    """The routes of vLLM's development mode that are used."""

    def failed(message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "code": 500}}, status=500)

    async def handle(request: web.Request) -> web.StreamResponse:
        toy.calls.append(request.path_qs)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/health":
                return web.Response()
            case "/get_world_size":
                return web.json_response({"world_size": toy.ranks})
            case "/server_info":
                config = {"parallel_config": {"data_parallel_size": 1}, "lora_config": None}
                return web.json_response({"vllm_config": {**config, **toy.settings}})
            case "/weight_info":
                return web.json_response({"weight_version": toy.label})
            case "/update_weight_version":
                toy.label = body["new_version"]
                return web.json_response({"success": True, "new_version": toy.label})
            case "/pause":
                assert dict(request.query) == {"mode": "keep", "clear_cache": "true"}
                return _pause(toy) or web.json_response({"status": "paused"})
            case "/resume":
                toy.paused = toy.faults.stay_paused
                return web.json_response({"status": "resumed"})
            case "/is_paused":
                return web.json_response({"is_paused": toy.paused})
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                before = toy.label
                if not toy.load(Path(body["kwargs"]["weights_path"]), before):
                    return failed("Call to collective_rpc method failed: Worker failed")
                if toy.faults.lose_load and request.transport is not None:
                    request.transport.abort()
                return web.json_response({"results": [None] * toy.ranks})
            case "/reset_prefix_cache":
                return web.json_response({"success": not toy.faults.keep_cache})
            case "/weight_checker":
                assert body == {"action": "checksum"}, "others change weights"
                found = {f"dp0:pp0:pcp0:tp{r}:{name}": v for r, name, v in toy.checksums()}
                return web.json_response({"checksums": found})
            case "/v1/completions":
                return web.json_response(_completions(toy, body))
        return web.json_response({"detail": "Not Found"}, status=404)

    return _app(handle)


def _completions(toy: ToyEngine, body: dict[str, Any]) -> dict[str, Any]:
    assert body["cache_salt"]
    choices = []
    for index, prompt in enumerate(body["prompt"]):
        steps = toy.answer(prompt)
        logprobs = {
            "token_logprobs": [None if math.isnan(p) else p for _, p, _ in steps],
            "top_logprobs": [{"a": p if p == p else None, "b": q} for _, p, q in steps],
        }
        choices.append(
            {"index": index, "token_ids": [t for t, _, _ in steps], "logprobs": logprobs}
        )
    return {"choices": choices[::-1]}


def sglang_app(toy: ToyEngine) -> web.Application:
    """SGLang's routes that are used."""

    async def handle(request: web.Request) -> web.StreamResponse:
        toy.calls.append(request.path_qs)
        body = await request.json() if request.can_read_body else {}
        match request.path:
            case "/server_info":
                return web.json_response({"tp_size": toy.ranks, "dp_size": 1, **toy.settings})
            case "/model_info":
                return web.json_response({"weight_version": toy.label})
            case "/update_weight_version":
                assert body["abort_all_requests"] is False
                toy.label = body["new_version"]
                return web.json_response({"success": True, "new_version": toy.label})
            case "/pause_generation":
                assert body == {"mode": "retract"}
                return _pause(toy) or web.json_response({"status": "ok"})
            case "/continue_generation":
                toy.paused = False
                return web.json_response({"status": "ok"})
            case "/update_weights_from_disk":
                assert (body["flush_cache"], body["abort_all_requests"]) == (True, False)
                done = toy.load(Path(body["model_path"]), body["weight_version"])
                if toy.faults.lose_load and request.transport is not None:
                    request.transport.abort()
                answer = {"success": done, "message": "", "num_paused_requests": 0}
                return web.json_response(answer, status=200 if done else 400)
            case "/weights_checker":
                assert body == {"action": "checksum"}, "others change weights"
                return web.json_response({"success": True, "ranks": _ranks(toy)})
            case "/generate":
                return web.json_response([_meta(toy, ids) for ids in body["input_ids"]])
        return web.json_response({"detail": "Not Found"}, status=404)

    return _app(handle)


def _ranks(toy: ToyEngine) -> list[dict[str, Any]]:
    return [
        {
            "checksums": {name: v[:16] for r, name, v in toy.checksums() if r == rank},
            "parallelism_info": [
                {"role": "target", "rank": rank, "tp_rank": rank, "tp_size": toy.ranks}
            ],
        }
        for rank in range(toy.ranks)
    ]


def _meta(toy: ToyEngine, prompt: Sequence[int]) -> dict[str, Any]:
    steps = toy.answer(prompt)
    chosen = [[None if math.isnan(p) else p, t, None] for t, p, _ in steps]
    top = [[[p if p == p else None, t, None], [q, 0, None]] for t, p, q in steps]
    return {"meta_info": {"output_token_logprobs": chosen, "output_top_logprobs": top}}


def _pause(toy: ToyEngine) -> web.Response | None:
    """The answer if it refuses."""
    if toy.faults.refuse_pauses:
        toy.faults.refuse_pauses -= 1
        return web.json_response({"error": "planned"}, status=500)
    toy.paused = True
    return None


def _app(handle: Any) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    return app
