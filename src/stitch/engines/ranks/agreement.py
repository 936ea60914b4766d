"""What the ranks know together: coverage of every tensor, refusals, digests of the live weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.codec import DigestState, UpdateSet
from stitch.engines.placement.blocks import SourceSet
from stitch.engines.placement.terms import Terms, join
from stitch.engines.ranks import port
from stitch.engines.ranks.port import Answer
from stitch.errors import EngineError, SchemaMismatchError
from stitch.types import Schema, TensorSpec

Holder = tuple[int, int]
"""(rank, number of one of its blocks of a tensor)."""


@dataclass(frozen=True)
class _Share:
    """One set of elements of a tensor, and who holds it; the first of them is taken for it."""

    elements: SourceSet
    holders: tuple[Holder, ...]


class Agreement:
    """Made from the `learn` answers of all ranks, in rank order.

    `refused`: name -> why it cannot be changed in place. Every other tensor of the schema is
    covered in full by the ranks together, each element once or in equal shares. `notes`: texts for
    the start-up log. `settlement`: what every rank's `settle` is given.
    """

    def __init__(
        self,
        schema: Schema,
        shares: Mapping[str, Sequence[_Share]],
        refused: Mapping[str, str],
        twins: Mapping[str, str],
        notes: Sequence[str],
        world: int,
    ) -> None:
        self.schema = schema
        self.refused = dict(refused)
        self.notes = tuple(notes)
        self.settlement: Answer = {"refused": self.refused, "twins": dict(twins)}
        self._shares = shares
        self._world = world

    @classmethod
    def of(cls, schema: Schema, answers: Sequence[Mapping[str, Any]]) -> Agreement:
        """Raises what `port.check` raises, and EngineError if the answers do not fit together."""
        port.check(answers)
        _check_ranks(schema, answers)
        refused = _refusals(answers)
        twins = _twins(answers, refused)
        shares: dict[str, list[_Share]] = {}
        for spec in schema.tensors:
            if spec.name in refused:
                continue
            held = _holders(twins.get(spec.name, spec.name), answers)
            reason = _gap(spec, held)
            if reason:
                refused[spec.name] = reason
            else:
                shares[spec.name] = held
        for name, twin in list(twins.items()):
            if name in refused or twin in refused:
                del twins[name]
        notes = [f"rank {a['rank']}: {note}" for a in answers for note in a["notes"]]
        notes += [f"{name} is taken for {twin}, which it equals" for name, twin in twins.items()]
        return cls(schema, shares, refused, twins, notes, len(answers))

    def check_update(self, update: UpdateSet) -> None:
        """Raise EngineError if the update changes a refused tensor (only a reload can do that)."""
        for item in update.updates:
            name = self.schema.tensors[item.tensor].name
            if name in self.refused and item.new.size:
                raise EngineError(f"tensor {name} cannot be changed in place: {self.refused[name]}")

    def combine(
        self, answers: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None
    ) -> DigestState:
        """The digest of the live weights from all ranks' `lanes` answers.

        With `names`, only their lanes are set (those given to `lanes`). Raises EngineError that
        names tensors that cannot be told (refused ones), or whose copies on several ranks differ,
        and what `port.check` raises.
        """
        port.check(answers)
        wanted = list(self.schema.index) if names is None else list(names)
        unknown = [name for name in wanted if name not in self._shares]
        if unknown:
            raise EngineError(f"no digest of tensors that are not placed in full: {unknown[:8]}")
        if len({answer["state"] for answer in answers}) > 1:
            raise EngineError("the ranks digested different weights; ask again")
        differing = sorted({name for answer in answers for name in answer["differing"]})
        lanes = np.zeros((len(self.schema), 2), np.uint64)
        for name in wanted:
            spec = self.schema[name]
            try:
                terms = [self._share_terms(name, share, answers) for share in self._shares[name]]
                whole = join([term for term in terms if term is not None], spec.num_bytes)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise EngineError(
                    f"what the ranks digested of {name} makes no sense: {error!r}"
                ) from error
            if None in terms or whole.edges.size:
                differing.append(name)
            lanes[self.schema.index[name]] = whole.lanes
        if differing:
            raise EngineError(f"the engine's copies of {differing[:8]} differ")
        return DigestState(self.schema, lanes)

    def _share_terms(
        self, name: str, share: _Share, answers: Sequence[Mapping[str, Any]]
    ) -> Terms | None:
        """A share's terms; None if its holders do not agree."""
        rank, block = share.holders[0]
        first = answers[rank]["terms"][name][block]
        for rank, block in share.holders[1:]:
            if answers[rank]["terms"][name][block] != first:
                return None
        return Terms.from_json(first)


def _check_ranks(schema: Schema, answers: Sequence[Mapping[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        if answer["schema"] != schema.digest:
            raise SchemaMismatchError(f"rank {rank} learned another schema: {answer['schema']}")
        if (answer["rank"], answer["world"]) != (rank, len(answers)):
            raise EngineError(
                f"answer {rank} of {len(answers)} is of rank {answer['rank']} of {answer['world']}"
            )


def _refusals(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    refused: dict[str, str] = {}
    for answer in answers:
        for name, reason in answer["refused"].items():
            refused.setdefault(name, reason)
    return refused


def _twins(answers: Sequence[Mapping[str, Any]], refused: Mapping[str, str]) -> dict[str, str]:
    """Names that no rank places and all ranks take for the same other name."""
    twins: dict[str, str] = {}
    for name, twin in answers[0]["twins"].items() if answers else ():
        agreed = all(answer["twins"].get(name) == twin for answer in answers)
        if agreed and twin not in refused:
            twins[name] = twin
    return twins


def _holders(name: str, answers: Sequence[Mapping[str, Any]]) -> list[_Share]:
    held: dict[SourceSet, list[Holder]] = {}
    for rank, answer in enumerate(answers):
        for number, value in enumerate(answer["names"].get(name, ())):
            held.setdefault(SourceSet.from_json(value), []).append((rank, number))
    shares = [_Share(elements, tuple(holders)) for elements, holders in held.items()]
    return sorted(shares, key=lambda share: share.elements.source)


def _gap(spec: TensorSpec, shares: Sequence[_Share]) -> str:
    """Why the shares are not every element once; empty if they are."""
    if not spec.num_words:
        return ""
    if not shares:
        return "no rank's loader takes it"
    if max(share.elements.stop for share in shares) > spec.num_words:
        return "a rank places more elements than it has"
    total = sum(share.elements.num for share in shares)
    reach = 0
    for share in shares:
        if share.elements.source != reach or not share.elements.is_run:
            break
        reach = share.elements.stop
    if reach != spec.num_words:
        taken = np.zeros(spec.num_words, bool)
        for share in shares:
            share.elements.of(taken)[...] = True
        reach = int(taken.sum())
    if reach < spec.num_words:
        return f"{reach} of its {spec.num_words} elements are placed"
    return "" if total == reach else "the ranks keep parts of it that overlap"
