"""The decode thread: requests join and leave between steps, and so do weight changes.

Everything that touches the model runs on this one thread, so a step never sees half a change and
a token's label is simply the version at the start of the step that computed its logits.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from stitch.engines.embedded.attention import KeyValuePool, Row
from stitch.engines.embedded.generation import Event, Failed, Generation
from stitch.errors import EngineError, RetryableError
from stitch.types import VersionRef

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the process gives up."""
EXIT_CODE = 70


class QueueFullError(RetryableError):
    """Too many requests wait; try again later."""


class Forward(Protocol):
    """What the loop needs of a model (see LoadedModel)."""

    def new_pool(self, num_slots: int, max_len: int) -> KeyValuePool: ...

    def forward(
        self, pool: KeyValuePool, rows: tuple[Row, ...], tokens: list[int], positions: list[int]
    ) -> torch.Tensor: ...


Deliver = Callable[[list[tuple[Generation, Event]]], None]


def deliver_directly(batch: list[tuple[Generation, Event]]) -> None:
    """Call each sink on the decode thread."""
    for generation, event in batch:
        generation.sink(event)


class DecodeLoop:
    """Continuous batching over `max_slots` slots of `max_len` tokens each.

    `deliver` gets the events of one step at once, on the decode thread. `max_step_tokens` bounds
    the prompt tokens that one step takes in (a longer prompt goes alone).
    """

    def __init__(
        self,
        model: Forward,
        *,
        max_slots: int,
        max_len: int,
        max_queue: int,
        deliver: Deliver = deliver_directly,
        max_step_tokens: int = 1024,
    ) -> None:
        self.ref: VersionRef | None = None
        """Label of the live weights. Written on the decode thread only."""
        self._model = model
        self._pool = model.new_pool(max_slots, max_len)
        self._free = list(range(max_slots))
        self._max_queue = max_queue
        self._max_slots = max_slots
        self._max_step_tokens = max_step_tokens
        self._deliver = deliver
        self._wake = threading.Condition()
        self._queue: deque[Generation] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._active: list[Generation] = []
        self._failed_steps = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stitch-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way; whatever is unfinished fails."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue all of them, first in first out, or raise QueueFullError and queue none."""
        with self._wake:
            room = self._max_queue + len(self._free)
            if self._stopping or len(self._queue) + len(generations) > room:
                raise QueueFullError(
                    f"{len(self._queue)} generations wait and {len(self._active)} run; "
                    f"no room for {len(generations)} more"
                )
            self._queue.extend(generations)
            self._wake.notify()

    def abort(self, generations: Sequence[Generation]) -> None:
        """Forget generations, queued or running; their slots are free before the next step."""
        with self._wake:
            for generation in generations:
                generation.aborted = True
            self._queue = deque(it for it in self._queue if not it.aborted)
            self._wake.notify()

    def call(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run `work` on the decode thread between two steps, also when nothing is running."""
        future: Future[_Result] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineError("the engine is stopping"))
                return future
            self._calls.append((work, future))
            self._wake.notify()
        return future

    # --- decode thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            self.turn()
        self._fail(self._active + list(self._queue), "the engine is stopping")

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do. False to end."""
        with self._wake:
            self._wake.wait_for(self._has_work)
            if self._stopping:
                self._cancel_calls()
            return not self._stopping

    def turn(self) -> None:
        """Calls, departures and arrivals, then one step. For the decode thread (and tests)."""
        with self._wake:
            calls, self._calls = self._calls, deque()
        for work, future in calls:
            _run_call(work, future)
        with self._wake:
            self._retire([it for it in self._active if it.aborted])
            self._admit()
        if self._active:
            self._step()

    def _has_work(self) -> bool:
        return bool(self._stopping or self._calls or self._active or self._queue)

    def _cancel_calls(self) -> None:
        for _, future in self._calls:
            future.set_exception(EngineError("the engine is stopping"))
        self._calls.clear()

    def _admit(self) -> None:
        room = self._max_step_tokens
        while (
            self._queue
            and self._free
            and (room == self._max_step_tokens or room >= len(self._queue[0].prompt))
        ):
            generation = self._queue.popleft()
            generation.slot = self._free.pop()
            room -= len(generation.prompt)
            self._active.append(generation)

    def _retire(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._active.remove(generation)
            self._free.append(generation.slot)
            generation.slot = -1

    def _step(self) -> None:
        """One forward pass over every active row, then one token for each generation."""
        version = self.ref.version if self.ref else None
        step = _pack(self._active)
        try:
            logits = self._model.forward(self._pool, step.rows, step.tokens, step.positions)
            for generation, row in zip(self._active, step.row_of, strict=True):
                leader = step.rows[row]
                if generation.slot != leader.slot:
                    self._pool.copy(leader.slot, generation.slot, leader.stop - leader.start)
        except Exception as error:  # the edge of a step: its requests fail, the engine lives
            self._step_failed(error)
            return
        self._failed_steps = 0
        batch: list[tuple[Generation, Event]] = []
        finished = []
        for generation, row in zip(self._active, step.row_of, strict=True):
            event = _advance(generation, logits[row], version)
            batch.append((generation, event))
            if isinstance(event, Failed) or event.finish is not None:
                finished.append(generation)
        with self._wake:
            self._retire(finished)
        self._deliver([(it, event) for it, event in batch if not it.aborted])

    def _step_failed(self, error: Exception) -> None:
        _log.exception("event=step_failed rows=%d", len(self._active))
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            exit_loudly(f"{MAX_FAILED_STEPS} decoding steps failed in a row, the last: {error!r}")
        failed = list(self._active)
        with self._wake:
            self._retire(failed)
        self._fail(failed, f"the decoding step failed: {error!r}")

    def _fail(self, generations: Sequence[Generation], message: str) -> None:
        self._deliver([(it, Failed(message)) for it in generations if not it.aborted])


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A step's input, and for each active generation the row whose logits are its own."""

    rows: tuple[Row, ...]
    tokens: list[int]
    positions: list[int]
    row_of: list[int]


def _pack(active: Sequence[Generation]) -> _Packed:
    """Whole prompts of those that just joined, one token of all others.

    Generations that join together with the same prompt (choices of one request, a GRPO group)
    share one row: alone, each would compute the very same numbers.
    """
    rows: list[Row] = []
    tokens: list[int] = []
    positions: list[int] = []
    row_of: list[int] = []
    leaders: dict[tuple[int, ...], int] = {}
    for generation in active:
        if not generation.output:
            row = leaders.setdefault(tuple(generation.prompt), len(rows))
            row_of.append(row)
            if row < len(rows):
                continue
        else:
            row_of.append(len(rows))
        start = len(tokens)
        at = generation.length - 1 if generation.output else 0
        tokens.extend(generation.output[-1:] or generation.prompt)
        positions.extend(range(at, generation.length))
        rows.append(Row(generation.slot, start, len(tokens), at))
    return _Packed(rows=tuple(rows), tokens=tokens, positions=positions, row_of=row_of)


def _advance(generation: Generation, logits: torch.Tensor, version: int | None) -> Event:
    try:
        token = generation.sampler.pick(logits, generation.banned)
        return generation.accept(token, version)
    except Exception as error:  # the edge of one request: it ends, its neighbours go on
        _log.exception("event=sampling_failed")
        return Failed(f"sampling failed: {error!r}")


def _run_call(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # the edge of a call: it is raised where the caller waits
        future.set_exception(error)


def exit_loudly(reason: str) -> NoReturn:
    """End the process at once: what it would serve is in doubt."""
    print(f"stitch engine: fatal: {reason}; exiting", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
