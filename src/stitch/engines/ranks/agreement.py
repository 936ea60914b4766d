"""What the ranks know together: coverage of every tensor, refusals, digests of the live weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stitch.codec import DigestState, UpdateSet
from stitch.engines.ranks.port import Answer
from stitch.types import Schema


class Agreement:
    """Made from the `learn` answers of all ranks, in rank order.

    `refused`: name -> why it cannot be changed in place. Every other tensor of the schema is
    covered in full by the ranks together. `notes`: texts for the start-up log. `settlement`: what
    every rank's `settle` is given.
    """

    schema: Schema
    refused: Mapping[str, str]
    notes: Sequence[str]
    settlement: Answer

    @classmethod
    def of(cls, schema: Schema, answers: Sequence[Mapping[str, Any]]) -> Agreement:
        """Raises what `port.check` raises, and EngineError if the answers do not fit together."""
        raise NotImplementedError

    def check_update(self, update: UpdateSet) -> None:
        """Raise EngineError if the update changes a refused tensor (only a reload can do that)."""
        raise NotImplementedError

    def combine(
        self, answers: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None
    ) -> DigestState:
        """The digest of the live weights from all ranks' `lanes` answers.

        With `names`, only their lanes are set (those given to `lanes`). Raises EngineError that
        names tensors that cannot be told (refused ones), or whose copies on several ranks differ,
        and what `port.check` raises.
        """
        raise NotImplementedError
