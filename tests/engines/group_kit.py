"""Groups of ranks in this process: fakes on host weights, with faults to switch on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from aiohttp import web

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.codec.digest import first_word
from stitch.codec.kernels import sum_words
from stitch.engines.group.engine import GroupEngine, GroupTraits
from stitch.engines.group.workers import WorkersLostError
from stitch.engines.ranks.port import Answer, check, failure
from stitch.errors import EngineError, FatalReplicaError, StitchError
from stitch.tensors import HostWeights
from stitch.types import Schema, VersionRef


class ExitedError(Exception):
    """What a real engine's end looks like in a test."""


class FakeRank:
    """Holds every world-th share of each tensor, cut on whole digest words."""

    def __init__(self, weights: HostWeights, rank: int, world: int) -> None:
        self.weights = weights
        self.rank, self.world = rank, world
        self.fails: dict[str, StitchError] = {}
        """Method -> what it answers instead of doing its work; `commit` does half of it first."""
        self.stage_id: str | None = None
        self.parts: dict[int, UpdateSet] = {}
        self.committed = False

    def call(self, method: str, *args: Any) -> Answer:
        try:
            if method in self.fails and method != "commit":
                raise self.fails[method]
            return {"ok": True, **(getattr(self, method)(*args) or {})}
        except Exception as error:  # as every rank must
            return failure(error)

    def share(self, num_words: int) -> tuple[int, int]:
        per = -(-num_words // (8 * self.world)) * 8
        return min(num_words, self.rank * per), min(num_words, (self.rank + 1) * per)

    def stage_part(self, stage_id: str, number: int, source: str) -> None:
        if stage_id != self.stage_id or self.committed:
            self.forget()
            self.stage_id = stage_id
        part = UpdateSet.from_bytes(Path(source).read_bytes(), self.weights.schema)
        for item in part.updates:
            name = self.weights.schema.tensors[item.tensor].name
            at, old = self.mine(item, item.old)
            if not (self.weights.words_at(item.tensor)[at] == old).all():
                raise EngineError(
                    f"tensor {name}: the old words in the stage are not the live ones"
                )
        self.parts[number] = part

    def mine(self, item: TensorUpdate, values: Any) -> tuple[Any, Any]:
        start, stop = self.share(self.weights.schema.tensors[item.tensor].num_words)
        positions = item.flat_positions()
        here = (positions >= start) & (positions < stop)
        return positions[here], values[here]

    def seal(self, stage_id: str, num_parts: int, num_changed: int) -> None:
        found = sum(part.num_changed for part in self.parts.values())
        if (len(self.parts), found) != (num_parts, num_changed):
            raise EngineError(f"{len(self.parts)} parts with {found} changes")

    def write(self, which: str, half: bool = False) -> None:
        items = [item for part in self.parts.values() for item in part.updates]
        for item in items[: len(items) // 2] if half else items:
            at, values = self.mine(item, getattr(item, which))
            self.weights.words_at(item.tensor)[at] = values

    def commit(self, stage_id: str) -> None:
        if self.stage_id != stage_id:
            raise EngineError(f"stage {stage_id!r} is not held")
        if "commit" in self.fails:
            error = self.fails.pop("commit")
            self.write("new", half=True)
            if not isinstance(error, FatalReplicaError):
                self.write("old")
            raise error
        self.write("new")
        self.committed = True

    def undo(self, stage_id: str) -> Answer:
        if not self.committed or stage_id != self.stage_id:
            return {"undone": False}
        self.write("old")
        self.forget()
        return {"undone": True}

    def discard(self) -> None:
        if not self.committed:
            self.forget()

    def forget(self) -> None:
        self.stage_id, self.parts, self.committed = None, {}, False

    def lanes(self, names: Sequence[str]) -> Answer:
        found = {}
        for name in names:
            words = self.weights.words(name)
            start, stop = self.share(words.size)
            lanes = sum_words(words[start:stop], first_word(start, words.itemsize))
            found[name] = [int(lane) for lane in lanes] if stop > start else [0, 0]
        return {"lanes": found}


class FakeAgreement:
    """Stands for the real one, whose ranks are torch models."""

    def __init__(self, schema: Schema, refused: dict[str, str] | None = None) -> None:
        self.schema = schema
        self.refused = {} if refused is None else refused

    def check_update(self, update: UpdateSet) -> None:
        for item in update.updates:
            name = self.schema.tensors[item.tensor].name
            if name in self.refused:
                raise EngineError(f"tensor {name} cannot be changed in place: {self.refused[name]}")

    def combine(self, answers: Sequence[Answer], names: Sequence[str]) -> DigestState:
        check(answers)
        lanes = np.zeros((len(self.schema), 2), np.uint64)
        for answer in answers:
            for name, pair in answer["lanes"].items():
                lanes[self.schema.index[name]] += np.array(pair, np.uint64)
        return DigestState(self.schema, lanes)


class FakeWorkers:
    """Ranks in this process, with a log of what was asked of them and of the engine's switches."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = ranks
        self.log: list[str] = []
        self.lose: set[str] = set()
        """Methods whose answers get lost, after the work was done."""
        self.breaks: set[str] = set()
        """Switches (pause, resume, label) that raise."""
        self.paused = False
        self.exited: str | None = None
        self.refs: list[VersionRef] = []
        self.written_unpaused = False

    @property
    def calls(self) -> Counter[str]:
        return Counter(self.log)

    async def call(self, method: str, *args: object) -> list[Answer]:
        self.log.append(method)
        self.written_unpaused |= method in ("commit", "undo") and not self.paused
        answers = [rank.call(method, *args) for rank in self.ranks]
        if method in self.lose:
            raise WorkersLostError(f"the answers to {method} got lost")
        return answers

    def _switch(self, name: str) -> None:
        self.log.append(name)
        if name in self.breaks:
            raise RuntimeError(f"{name} broke")

    async def pause(self) -> None:
        self._switch("pause")
        self.paused = True

    async def resume(self) -> None:
        self._switch("resume")
        self.paused = False

    async def label(self, ref: VersionRef) -> None:
        self._switch("label")
        self.refs.append(ref)

    def is_alive(self) -> bool:
        return self.exited is None

    def exit(self, reason: str) -> NoReturn:
        self.exited = reason
        raise ExitedError(reason)


def fake_group(
    weights: HostWeights, world: int, scratch: Path, refused: dict[str, str] | None = None
) -> tuple[GroupEngine, FakeWorkers]:
    """A group whose ranks share `weights`, each writing only its own part."""
    workers = FakeWorkers([FakeRank(weights, rank, world) for rank in range(world)])
    agreement: Any = FakeAgreement(weights.schema, refused)
    traits = GroupTraits(engine="fake-group", salt_field="cache_salt")
    return GroupEngine(workers, agreement, traits, scratch=scratch), workers


def asgi_app(application: Any, prefix: str = "") -> web.Application:
    """An ASGI application behind aiohttp's server, as a Starlette host would call it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        raw_path = request.raw_path.partition("?")[0].encode()
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": raw_path,
            "root_path": prefix,
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
        }
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            chunk = await request.content.read(64 * 1024)
            more = not request.content.at_eof()
            return {"type": "http.request", "body": chunk, "more_body": more}

        async def send(message: Any) -> None:
            sent.append(message)

        await application(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return web.Response(status=sent[0]["status"], headers=headers, body=sent[1]["body"])

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    return app
