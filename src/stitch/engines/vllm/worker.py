"""The worker extension: one rank's weights, reached by `collective_rpc("stitch_call", ...)`.

vLLM mixes the class into its worker. An exception that crossed the RPC would leave the answers of
other ranks in their queues, where the next call would find them; so `stitch_call` never raises, and
every answer carries the number of its call and its rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from stitch.engines.ranks.port import Answer, failure
from stitch.engines.ranks.weights import RankWeights
from stitch.errors import UsageError
from stitch.tensors import open_checkpoint
from stitch.views import ViewReader

METHODS = frozenset({
    "learn", "settle", "describe", "stage_part", "seal", "commit", "undo", "discard", "forget",
    "lanes", "begin", "finish",
})  # fmt: skip
"""Methods of the port `Rank`; nothing else of it may be called from outside."""


class StitchWorkerExtension:
    """Mixed into vLLM's worker: adds one method, `stitch_call`, and one attribute."""

    def stitch_call(self, number: int, method: str, args: Sequence[Any]) -> Answer:
        """Answer for one method of `Rank`, or for `open`, which comes first (model dir, view)."""
        worker: Any = self
        try:
            if method == "open":
                answer = _open(worker, *args)
            elif method in METHODS:
                answer = _call(worker, method, args)
            else:
                raise UsageError(f"no rank does {method!r:.100}")
        except BaseException as error:  # the edge of an RPC that must not see any
            answer = failure(error)
        return {**answer, "call": number, "at_rank": worker.rank}


def _open(worker: Any, directory: str, view: str) -> Answer:
    reader = ViewReader(open_checkpoint(directory), view)
    model = worker.model_runner.get_model()
    worker._stitch_rank = RankWeights(
        model,
        reader.schema,
        rank=worker.rank,
        world=worker.parallel_config.world_size,
        load=model.load_weights,
        reader=reader,
        build=lambda pairs: _second_model(worker, pairs),
    )
    return {"ok": True, "schema_digest": reader.schema.digest, "pid": os.getpid()}


def _call(worker: Any, method: str, args: Sequence[Any]) -> Answer:
    from vllm.config import set_current_vllm_config

    rank: RankWeights | None = getattr(worker, "_stitch_rank", None)
    if rank is None:
        raise UsageError(f"{method}: this rank was not opened")
    if method == "learn":  # it runs the model's loader, which asks for the configuration
        with set_current_vllm_config(worker.vllm_config):
            return rank.learn()
    answer: Answer = getattr(rank, method)(*args)
    return answer


def _second_model(worker: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """A model built as vLLM builds its own, up to the repacking of weights, but not registered."""
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )

    config = worker.vllm_config
    device = torch.device(config.device_config.device)
    with _unregistered(config.compilation_config), _default_dtype(config.model_config.dtype):
        with device:
            model = initialize_model(vllm_config=config)
        model.load_weights(pairs)
        process_weights_after_loading(model, config.model_config, device)
    return model.eval()


@contextlib.contextmanager
def _unregistered(compilation: Any) -> Iterator[None]:
    """Layers enter their names into these tables, where each may stand only once."""
    tables: dict[str, Any] = {"static_forward_context": {}, "static_all_moe_layers": []}
    kept = {name: getattr(compilation, name) for name in tables if hasattr(compilation, name)}
    for name in kept:
        setattr(compilation, name, tables[name])
    try:
        yield
    finally:
        for name, table in kept.items():
            setattr(compilation, name, table)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
