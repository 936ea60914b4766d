"""One rank behind numbered calls that never raise, as a plugin's worker side answers them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stitch.engines.ranks.learning import Build
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


def answered(call: Callable[[], Answer], *, number: int, rank: int) -> Answer:
    """What `call` answers or fails with, marked as the answer of this rank to call `number`."""
    try:
        answer = call()
    except BaseException as error:  # the edge of an RPC that must not see any
        answer = failure(error)
    return {**answer, "call": number, "at_rank": rank}


def opened(
    model: Any, directory: str, view: str, *, rank: int, world: int, build: Build
) -> tuple[RankWeights, Answer]:
    """One rank's weights, read in the checkpoint `directory`, and the answer to `open`.

    `model` has a `load_weights` of its own; see RankWeights for `build`.
    """
    reader = ViewReader(open_checkpoint(directory), view)
    weights = RankWeights(
        model,
        reader.schema,
        rank=rank,
        world=world,
        load=model.load_weights,
        reader=reader,
        build=build,
    )
    return weights, {"ok": True, "schema_digest": reader.schema.digest, "pid": os.getpid()}


def call_rank(weights: RankWeights | None, method: str, args: Sequence[Any]) -> Answer:
    """One method of the port `Rank`; UsageError for others, and before `open`."""
    if method not in METHODS:
        raise UsageError(f"no rank does {method!r:.100}")
    if weights is None:
        raise UsageError(f"{method}: this rank was not opened")
    answer: Answer = getattr(weights, method)(*args)
    return answer


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, modules are made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
