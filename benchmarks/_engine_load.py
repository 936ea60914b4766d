"""Requests served while versions are committed: what is lost, whether any is failed or torn.

Clients ask in a closed loop. Quiet turns and turns with commits alternate, so that both meet the
same noise. The commits go back and forth between two versions that answer differently; afterwards
answers are judged by both of them, token by token, given all tokens before it: a token that is the
best of neither came out of weights that were neither. Judging is slow, so a sample is judged.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._engine_models import inverse
from benchmarks._engine_server import Server
from stitch.codec import UpdateSet
from stitch.types import VersionRef

CLIENTS, NUM_TOKENS, TURNS = 4, 16, 4
NUM_JUDGED = 12
TIE = 0.15
"""Logprobs of one token computed in batches of other sizes differ by less than this (BF16)."""


Asked = tuple[list[int], list[int]]
"""Prompt and output tokens."""


@dataclass
class Served:
    """Of one kind of turns."""

    seconds: float = 0.0
    tokens: int = 0


@dataclass
class Load:
    """Answers and failures of all turns."""

    server: Server
    answers: list[Asked] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask_forever(self, client: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            prompt = [client, number % 250, 7, 11]
            try:
                await self._stream(prompt)
            except Exception as error:  # it is the count of these that is asked for
                self.failed.append(repr(error))

    async def _stream(self, prompt: list[int]) -> None:
        tokens: list[int] = []
        async for new in self.server.stream(prompt, NUM_TOKENS):
            tokens += new
            self.tokens += len(new)
        if len(tokens) != NUM_TOKENS:
            raise ValueError(f"{len(tokens)} tokens of {NUM_TOKENS} came")
        self.answers.append((prompt, tokens))

    def stop(self) -> None:
        self._stop.set()


async def measure_load(
    server: Server, update: UpdateSet, at: VersionRef, *, num_commits: int, gap_s: float
) -> dict[str, Any]:
    """Serve while `num_commits` (even) commits go from `at` there and back; they start and end at
    the weights that the engine holds."""
    load = Load(server)
    clients = [asyncio.create_task(load.ask_forever(number)) for number in range(CLIENTS)]
    await asyncio.sleep(2 * gap_s)
    quiet, busy = Served(), Served()
    pauses: list[float] = []
    both = (update, inverse(update))
    per_turn = num_commits // TURNS
    for _ in range(TURNS):
        begin, before = time.perf_counter(), load.tokens
        for _ in range(per_turn):
            number = len(pauses)
            to = VersionRef(at.run, at.version + 1)
            due = time.perf_counter() + gap_s
            await server.client.stage(f"load-{number}", at, to, both[number % 2])
            pauses.append((await server.client.commit(f"load-{number}")).pause_ms)
            at = to
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        took_s = time.perf_counter() - begin
        busy.seconds += took_s
        busy.tokens += load.tokens - before
        before, begin = load.tokens, time.perf_counter()
        await asyncio.sleep(took_s)
        quiet.seconds += time.perf_counter() - begin
        quiet.tokens += load.tokens - before
    load.stop()
    await asyncio.gather(*clients)
    step = max(1, len(load.answers) // NUM_JUDGED)
    judged = load.answers[::step][:NUM_JUDGED]
    torn, mixed, untold = await _judged(server, judged, update, at)
    with_commits, without = busy.tokens / busy.seconds, quiet.tokens / quiet.seconds
    return {
        "commits": len(pauses),
        "seconds_between_commits": round(busy.seconds / len(pauses), 2),
        "num_changed": update.num_changed,
        "clients": CLIENTS,
        "answers": len(load.answers),
        "failed": len(load.failed),
        "failures": load.failed[:3],
        "judged": len(judged),
        "torn": torn,
        "spanning": mixed,
        "same_under_both": untold,
        "pause_ms": round(statistics.median(pauses), 2),
        "tokens_per_s": round(without, 1),
        "tokens_per_s_with_commits": round(with_commits, 1),
        "lost_share": round(1 - with_commits / without, 3),
    }


async def _judged(
    server: Server, answers: Sequence[Asked], update: UpdateSet, at: VersionRef
) -> tuple[int, int, int]:
    """(torn, of both versions, the same under both) of the answers."""
    here = [await _verdicts(server, *answer) for answer in answers]
    to = VersionRef(at.run, at.version + 1)
    await server.client.stage("judge", at, to, update)
    await server.client.commit("judge")
    there = [await _verdicts(server, *answer) for answer in answers]
    await server.client.roll_back(at)
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(here, there, strict=True)]
    torn = sum(not all(a or b for a, b in pair) for pair in pairs)
    spanning = sum(
        all(a or b for a, b in pair) and not all(a for a, _ in pair) and not all(b for _, b in pair)
        for pair in pairs
    )
    return torn, spanning, sum(all(a and b for a, b in pair) for pair in pairs)


async def _verdicts(server: Server, prompt: list[int], tokens: list[int]) -> list[bool]:
    """For each token, whether it is the best one under the weights that are live now."""
    status, body = await server.complete(
        [*prompt, *tokens], max_tokens=1, prompt_logprobs=1, return_token_ids=False
    )
    if status != 200:
        raise SystemExit(f"judging an answer failed: {body}")
    table = body["choices"][0]["prompt_logprobs"][len(prompt) :]
    verdicts = []
    for token, entry in zip(tokens, table, strict=True):
        best = max(float(item["logprob"]) for item in entry.values())
        verdicts.append(float(entry[str(token)]["logprob"]) >= best - TIE)
    return verdicts
