"""The worker extension: one rank's weights, reached by `collective_rpc("stitch_call", ...)`.

vLLM mixes the class into its worker. An exception that crossed the RPC would leave the answers of
other ranks in their queues, where the next call would find them; so `stitch_call` never raises, and
every answer carries the number of its call and its rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from stitch.engines.ranks.calls import answered, call_rank, default_dtype, opened
from stitch.engines.ranks.port import Answer
from stitch.engines.ranks.weights import RankWeights


class StitchWorkerExtension:
    """Mixed into vLLM's worker: adds one method, `stitch_call`, and one attribute."""

    def stitch_call(self, number: int, method: str, args: Sequence[Any]) -> Answer:
        """Answer for one method of `Rank`, or for `open`, which comes first (model dir, view)."""
        worker: Any = self
        return answered(lambda: _call(worker, method, args), number=number, rank=worker.rank)


def _call(worker: Any, method: str, args: Sequence[Any]) -> Answer:
    if method == "open":
        return _open(worker, *args)
    rank: RankWeights | None = getattr(worker, "_stitch_rank", None)
    if method != "learn":
        return call_rank(rank, method, args)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):  # the model's loader asks for it
        return call_rank(rank, method, args)


def _open(worker: Any, directory: str, view: str) -> Answer:
    worker._stitch_rank, answer = opened(
        worker.model_runner.get_model(),
        directory,
        view,
        rank=worker.rank,
        world=worker.parallel_config.world_size,
        build=lambda pairs: _second_model(worker, pairs),
    )
    return answer


def _second_model(worker: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """A model built as vLLM builds its own, up to the repacking of weights, but not registered."""
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )

    config = worker.vllm_config
    device = torch.device(config.device_config.device)
    with _unregistered(config.compilation_config), default_dtype(config.model_config.dtype):
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
