"""Our worker extension of vLLM, with faults; named by `--worker-extension-cls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from faults import with_faults

from stitch.engines.ranks.port import Answer
from stitch.engines.vllm.worker import StitchWorkerExtension


class FaultyWorkerExtension(StitchWorkerExtension):
    def stitch_call(self, number: int, method: str, args: Sequence[Any]) -> Answer:
        worker: Any = self
        call = super().stitch_call
        weights = getattr(worker, "_stitch_rank", None)
        return with_faults(worker.rank, method, weights, lambda: call(number, method, args))
