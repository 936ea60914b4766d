"""Hooks of SGLang's scheduler: one rank's weights behind a socket, changed while it is held."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stitch.engines.ranks.calls import answered, call_rank, default_dtype, opened
from stitch.engines.ranks.port import Answer
from stitch.engines.ranks.weights import RankWeights
from stitch.engines.sglang import SOCKETS_ENV
from stitch.engines.sglang.hold import Hold
from stitch.engines.sglang.rank_server import RankServer
from stitch.errors import EngineError

HELD = frozenset({"learn", "commit", "undo"})
"""Methods of the port `Rank` that need a scheduler that stands still."""
_ATTRIBUTE = "_stitch_rank"


def started(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After the scheduler was made, and before SGLang knows that it is ready."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = SchedulerRank(scheduler, parallel.tp_rank, parallel.tp_size)
    setattr(scheduler, _ATTRIBUTE, rank)
    RankServer(
        os.environ[SOCKETS_ENV], parallel.tp_rank, rank.answer, must_end=lambda: rank.hold.is_held
    )


def paused(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After the scheduler has paused."""
    rank: SchedulerRank = getattr(scheduler, _ATTRIBUTE)
    # Weights are ordinary tensors, which inference mode would make tensors of its own from.
    with torch.inference_mode(False), torch.no_grad():
        rank.hold.enter()


class SchedulerRank:
    """What one scheduler does for the front; `answer` is called in the thread of its socket."""

    def __init__(self, scheduler: Any, rank: int, world: int) -> None:
        self.hold = Hold()
        self._scheduler = scheduler
        self._rank, self._world = rank, world
        self.weights: RankWeights | None = None

    def answer(self, number: int, method: str, args: Sequence[Any]) -> Answer:
        """One method of the port `Rank`, or of:

        `open` (model directory, view), which comes first; `expect`, before a pause; `quiet` (how
        long to wait for the pause, in seconds), which empties all caches; `label` (version), in a
        pause; `release`, at its end.
        """
        return answered(lambda: self._do(method, args), number=number, rank=self._rank)

    def _do(self, method: str, args: Sequence[Any]) -> Answer:
        match method:
            case "open":
                return self._open(*args)
            case "expect":
                self.hold.expect()
            case "quiet":
                (wait_s,) = args
                return self.hold.run(lambda: _empty_caches(self._scheduler), wait_s)
            case "label":
                (version,) = args
                return self.hold.run(lambda: self._label(version))
            case "release":
                self.hold.release()
            case _ if method in HELD:
                return self.hold.run(lambda: call_rank(self.weights, method, args))
            case _:
                return call_rank(self.weights, method, args)
        return {"ok": True}

    def _open(self, directory: str, view: str) -> Answer:
        runner = self._scheduler.tp_worker.model_runner
        self.weights, answer = opened(
            runner.model,
            directory,
            view,
            rank=self._rank,
            world=self._world,
            build=lambda pairs: _second_model(runner, pairs),
        )
        return answer

    def _label(self, version: str) -> Answer:
        """From here on tokens are of this version, in the metadata of SGLang's answers."""
        self._scheduler.record_weight_version_change(new_version=version)
        return {"ok": True}


def _empty_caches(scheduler: Any) -> Answer:
    """Forget all keys, values and embeddings; EngineError if some are in use."""
    torch.get_device_module(scheduler.tp_worker.model_runner.device).synchronize()
    # Requests that wait for their grammar hold no keys or values, but count as work under way.
    grammars = scheduler.grammar_manager
    waiting, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        if not scheduler.flush_cache(empty_cache=False):
            raise EngineError("the scheduler keeps keys and values that are in use")
    finally:
        grammars.grammar_queue = waiting
    _forget_embeddings()
    return {"ok": True}


def _forget_embeddings() -> None:
    """SGLang keeps those of images over its own weight updates, and has nothing to empty them."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.init_mm_embedding_cache(mm_schedule.embedding_cache.max_size)


def _second_model(runner: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """A model built as SGLang builds its own, up to what it does to weights after loading."""
    from sglang.srt.model_loader import loader

    config, device = runner.model_config, torch.device(runner.device)
    quantization = loader._get_quantization_config(config, runner.load_config)
    with default_dtype(config.dtype):
        with device:
            model = loader._initialize_model(config, runner.load_config, quantization)
        loader.DefaultModelLoader.load_weights_and_postprocess(model, pairs, device)
    built: torch.nn.Module = model.eval()
    return built
