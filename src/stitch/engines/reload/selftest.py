"""What is found out about a stock engine before it may serve: that a reload does what it says.

First the current generation is loaded again: checksums and answers must stay. Where checksums do
not explain every parameter, a changed one is loaded too: two tokens change roles, in the embedding
and in the output head, so what the engine must answer then is known. An engine that computes with
a copy of either that reloads do not reach (vLLM on CPUs with tied weights) is found out here, and
not by wrong tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stitch.codec import TensorUpdate, UpdateSet
from stitch.engines.reload.answers import TOLERANCE, Answer, disagreement, exchanged
from stitch.engines.reload.checksums import Knowledge
from stitch.engines.reload.recipes import Guesses, kv_heads_of
from stitch.engines.reload.stock import StockEngine
from stitch.errors import FatalReplicaError
from stitch.tensors import WeightReader, open_checkpoint
from stitch.types import Schema

if TYPE_CHECKING:
    from stitch.engines.reload.checksums import Checksums
    from stitch.engines.reload.generations import Generation, Generations

_log = logging.getLogger(__name__)

PROMPTS = ((11, 7, 23, 5, 42, 13), (17, 29, 3, 31, 19, 8, 37), (41, 2, 9, 26, 33))
"""Token ids that every vocabulary has."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


@dataclass(frozen=True, kw_only=True)
class Proven:
    """What an engine reports and answers with the current generation loaded."""

    knowledge: Knowledge
    checksums: Checksums
    answers: tuple[Answer, ...]


async def prove_reload(
    stock: StockEngine, generations: Generations, *, label: str, fresh: bool
) -> Proven:
    """Load the current generation into an engine in whatever state, and prove that it is there.

    label: what the engine is labelled with while that goes on; fresh: it was started on the current
    generation and has loaded nothing since. Raises FatalReplicaError if its reloads cannot be
    relied on, and what `stock` raises.
    """
    path = str(generations.link)
    first = (await stock.checksums(), await stock.answers(PROMPTS)) if fresh else None
    await load_paused(stock, path, label)
    checksums, answers = await stock.checksums(), await stock.answers(PROMPTS)
    if first is not None:
        _check(_changes(first[0], checksums))
        _check(filter(None, [disagreement(first[1], answers)]))
    knowledge = await asyncio.to_thread(_learned, generations, checksums)
    _log.info(
        "event=reload_learned engine=%s explained=%d followed=%d dark=%d",
        stock.traits.engine, len(knowledge.recipes), len(knowledge.followed), len(knowledge.dark),
    )  # fmt: skip
    if not knowledge.explains_all:
        await _exchange_tokens(stock, generations, answers, label)
        _check(_changes(checksums, await stock.checksums()))
        _check(filter(None, [disagreement(answers, await stock.answers(PROMPTS))]))
    return Proven(knowledge=knowledge, checksums=checksums, answers=answers)


async def load_paused(stock: StockEngine, path: str, label: str) -> None:
    """Pause, load, go on; for engines that serve nobody."""
    await stock.pause()
    await stock.load(path, label)
    await stock.resume()


def _learned(generations: Generations, checksums: Checksums) -> Knowledge:
    directory = generations.current.path
    with open_checkpoint(directory) as checkpoint:
        guesses = Guesses(checkpoint.schema, kv_heads=kv_heads_of(directory))
        return Knowledge.learned(checksums, checkpoint, guesses)


def _changes(before: Checksums, after: Checksums) -> list[str]:
    names = {it.name for it in before.keys() | after.keys() if before.get(it) != after.get(it)}
    return [f"{name} changed" for name in sorted(names)]


async def _exchange_tokens(
    stock: StockEngine, generations: Generations, answers: Sequence[Answer], label: str
) -> None:
    """Have two tokens change roles, go back, and compare what came of it."""
    schema = generations.schema
    names = token_tensors(schema)
    pair = _pair(answers, schema[names[0]].shape[0]) if names else None
    if pair is None:
        _log.warning("event=reload_unproven reason='no tokens that could change roles'")
        return
    a, b = pair
    changed = await asyncio.to_thread(_exchanged_generation, generations, names, a, b)
    try:
        await load_paused(stock, str(changed.path), label)
        wrong = disagreement(exchanged(answers, a, b), await stock.answers(PROMPTS))
        await load_paused(stock, str(generations.link), label)
    finally:
        await asyncio.to_thread(generations.drop, changed)
    if wrong:
        raise FatalReplicaError(
            f"{stock.traits.engine} says that it reloaded its weights, but computes with old ones: "
            f"after tokens {a} and {b} changed roles in {' and '.join(names)}, {wrong}. It keeps "
            "copies of them that a reload does not reach (vLLM does so on CPUs, of tied weights): "
            "serve it with the plugin, --engine-mode plugin"
        )


def _exchanged_generation(
    generations: Generations, names: Sequence[str], a: int, b: int
) -> Generation:
    schema = generations.schema
    with open_checkpoint(generations.link) as checkpoint:
        updates = [_exchange(checkpoint, schema, name, a, b) for name in names]
    return generations.build(UpdateSet(sorted(updates, key=lambda it: it.tensor)), None)


def token_tensors(schema: Schema) -> list[str]:
    """The input embedding and, where there is one of its own, the output head; none if unsure."""
    embeddings = [name for name in schema.index if name.endswith(_EMBEDDINGS)]
    if len(embeddings) != 1 or len(schema[embeddings[0]].shape) != 2:
        return []
    shape = schema[embeddings[0]].shape
    heads = [n for n in schema.index if n.endswith(_HEADS) and schema[n].shape == shape]
    return embeddings + heads


def _pair(answers: Sequence[Answer], num_tokens: int) -> tuple[int, int] | None:
    """A token that is answered for certain, and one that occurs nowhere; None if there are none."""
    seen = {token for prompt in PROMPTS for token in prompt}
    steps = [step for answer in answers for step in answer]
    certain = [s.token for s in steps if s.lead > 2 * TOLERANCE and s.token not in seen]
    seen.update(step.token for step in steps)
    spare = next((token for token in range(num_tokens) if token not in seen), None)
    return (certain[0], spare) if certain and spare is not None else None


def _exchange(reader: WeightReader, schema: Schema, name: str, a: int, b: int) -> TensorUpdate:
    """Rows `a` and `b` of a matrix change places."""
    width = schema[name].num_words // schema[name].shape[0]
    low, high = sorted((a, b))
    first = reader.read(name, low * width, (low + 1) * width)
    second = reader.read(name, high * width, (high + 1) * width)
    positions = [np.arange(row * width, (row + 1) * width, dtype=np.int64) for row in (low, high)]
    return TensorUpdate(
        tensor=schema.index[name],
        positions=np.concatenate(positions),
        new=np.concatenate([second, first]),
        old=np.concatenate([first, second]),
    )


def _check(faults: Iterable[str]) -> None:
    found = list(faults)
    if found:
        raise FatalReplicaError(
            f"a reload of the same weights does not leave them as they were: {'; '.join(found[:4])}"
        )
