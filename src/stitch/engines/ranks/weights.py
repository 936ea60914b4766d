"""RankWeights: one rank's live weights behind the `Rank` port. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stitch.engines.ranks.port import Answer
from stitch.tensors.reader import WeightReader
from stitch.types import Schema

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Weights], object]
Build = Callable[[Weights], torch.nn.Module]


class RankWeights:
    """Implements `Rank`. Construction does nothing but keep its arguments."""

    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        *,
        rank: int,
        world: int,
        load: Load,
        reader: WeightReader,
        build: Build | None = None,
        dense_limit_bytes: int = 1 << 32,
    ) -> None:
        """`model` holds the weights of `reader` (whose schema is `schema`), loaded by the engine.

        load: the engine's own loader for (name, tensor) pairs, say `model.load_weights`; it is only
        ever run with its writes caught. build: makes a second model by the engine's whole start-up
        path, with any repacking after the load, from pairs that fill all of it; without it, names
        whose layout is changed after the load are refused. dense_limit_bytes: memory that a stage
        may spend on whole regions where a copy is faster than single writes.
        """
        raise NotImplementedError

    def learn(self) -> Answer:
        raise NotImplementedError

    def settle(self, settlement: Mapping[str, Any]) -> Answer:
        raise NotImplementedError

    def describe(self) -> Answer:
        raise NotImplementedError

    def stage_part(self, stage_id: str, number: int, source: bytes | str) -> Answer:
        raise NotImplementedError

    def seal(self, stage_id: str, num_parts: int, num_changed: int) -> Answer:
        raise NotImplementedError

    def commit(self, stage_id: str) -> Answer:
        raise NotImplementedError

    def undo(self, stage_id: str) -> Answer:
        raise NotImplementedError

    def discard(self) -> Answer:
        raise NotImplementedError

    def forget(self) -> Answer:
        raise NotImplementedError

    def lanes(self, names: Sequence[str] | None = None) -> Answer:
        raise NotImplementedError

    def begin(self, ticket: str, method: str, args: Sequence[Any]) -> Answer:
        raise NotImplementedError

    def finish(self, ticket: str, wait_s: float = 0.0) -> Answer:
        raise NotImplementedError
