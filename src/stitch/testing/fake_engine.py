"""An engine in memory for tests: the whole port on host weights, and OpenAI-like answers.

What it says depends only on the prompt, the version and (with `prefix_cache`) the version whose
"KV" the prompt was cached under, so a test can tell from an answer alone which weights made it.
Faults are switched on through `engine.faults`; nothing else in the product can inject them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.engines.port import CommitReceipt, EngineDescription, EngineState, VerifyReport
from stitch.errors import (
    BaseMismatchError,
    EngineError,
    EngineUnreachableError,
    FatalReplicaError,
)
from stitch.tensors import HostWeights
from stitch.tensors.reader import Subset
from stitch.types import VersionRef

Verb = Literal["describe", "bind", "stage", "commit", "roll_back", "discard", "verify", "generate"]


@dataclass(kw_only=True)
class Faults:
    """Switches; counters count down, sets name verbs of the port (and "generate")."""

    stage_failures: int = 0
    """So many stages raise EngineError."""
    commit_failures: int = 0
    """So many commits fail half-way and are undone."""
    undo_fails: bool = False
    """With commit_failures: the undo fails as well, so the engine dies."""
    hang: set[str] = field(default_factory=set)
    """These verbs never return (until `release` is set)."""
    die_on: set[str] = field(default_factory=set)
    """The engine dies when one of these is called."""
    lose_reply: set[str] = field(default_factory=set)
    """The next call of these does its work, then looks unreachable."""
    pause_s: float = 0.0
    """How long a commit stops generation."""
    commit_gate: asyncio.Semaphore | None = None
    """If set, each commit that has stopped generation needs a permit to go on."""
    token_s: float = 0.0
    """Time per output token."""
    token_gate: asyncio.Semaphore | None = None
    """If set, each output token needs one permit."""
    sse: Literal["plain", "crlf", "events", "bytes"] = "plain"
    """Framing of streams: LF, CRLF, with id/event/comment lines, or one byte a chunk."""
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, kw_only=True)
class FakeToken:
    """One output token and the versions behind it."""

    text: str
    token_id: int
    version: int | None
    cached: bool


@dataclass(frozen=True, kw_only=True)
class _Stage:
    stage_id: str
    base: VersionRef
    target: VersionRef
    update: UpdateSet


def fake_text(prompt: str, num_tokens: int, ref: VersionRef | None) -> str:
    """What a FakeEngine answers to `prompt` if every token comes from `ref`, nothing cached."""
    return "".join(_word(prompt, ref, ref, at) for at in range(num_tokens))


def _word(prompt: str, ref: VersionRef | None, kv_ref: VersionRef | None, at: int) -> str:
    seed = f"{prompt}|{ref}|{kv_ref}|{at}".encode()
    return " " + hashlib.sha256(seed).hexdigest()[:5]


class FakeEngine:
    """The Engine port on `weights`; `weights` is the live copy and is changed in place."""

    def __init__(
        self,
        weights: HostWeights,
        *,
        stamps_versions: bool = True,
        salt_field: str | None = "cache_salt",
        prefix_cache: bool = False,
        blocked_routes: tuple[str, ...] = ("/update_weights", "/pause", "/admin/*"),
        model: str = "fake",
    ) -> None:
        self.weights = weights
        self.model = model
        self.faults = Faults()
        self.dead = False
        self.requests: list[dict[str, Any]] = []
        """Bodies of the generation requests that arrived."""
        self.running = 0
        self.aborted = 0
        """Generations whose client went away."""
        self.boot = uuid.uuid4().hex
        self._ref: VersionRef | None = None
        self._state: EngineState = "ready"
        self._staged: _Stage | None = None
        self._undo: _Stage | None = None
        self._receipt: CommitReceipt | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._order = asyncio.Lock()
        self._stamps_versions = stamps_versions
        self._salt_field = salt_field
        self._blocked_routes = blocked_routes
        self._cache: dict[tuple[str, str], VersionRef | None] | None = {} if prefix_cache else None

    @property
    def ref(self) -> VersionRef | None:
        return self._ref

    @property
    def stamps_versions(self) -> bool:
        return self._stamps_versions

    @property
    def salt_field(self) -> str | None:
        return self._salt_field

    # --- the port ------------------------------------------------------------------------------

    async def describe(self) -> EngineDescription:
        await self._enter("describe")
        staged = self._staged
        return EngineDescription(
            engine="fake",
            boot=self.boot,
            ref=self._ref,
            schema_digest=self.weights.schema.digest,
            state=self._state,
            staged=staged.stage_id if staged else None,
            staged_target=staged.target if staged else None,
            committed=self._undo.stage_id if self._undo else None,
            stamps_versions=self._stamps_versions,
            salt_field=self._salt_field,
            blocked_routes=self._blocked_routes,
        )

    async def bind(self, ref: VersionRef, digest: str) -> None:
        async with self._verb("bind"):
            found = DigestState.of(self.weights).version_digest()
            if found != digest:
                raise BaseMismatchError(
                    f"the engine holds weights of digest {found}, {ref} has {digest}"
                )
            self._ref, self._staged, self._undo = ref, None, None

    async def stage(
        self, stage_id: str, base: VersionRef, target: VersionRef, update: UpdateSet
    ) -> None:
        async with self._verb("stage"):
            if self._staged is None and self._undo and self._undo.stage_id == stage_id:
                raise EngineError(f"stage {stage_id!r} is already committed")
            self._staged, self._undo = None, None
            if self.faults.stage_failures:
                self.faults.stage_failures -= 1
                raise EngineError(f"stage {stage_id!r}: injected failure")
            if base != self._ref:
                raise EngineError(f"stage starts from {base}, the engine serves {self._ref}")
            for item in update.updates:
                self._check(item)
            self._staged = _Stage(stage_id=stage_id, base=base, target=target, update=update)

    async def commit(self, stage_id: str) -> CommitReceipt:
        async with self._verb("commit"):
            if self._undo and self._undo.stage_id == stage_id and self._receipt:
                return self._receipt
            stage = self._staged
            if stage is None or stage.stage_id != stage_id:
                raise EngineError(
                    f"stage {stage_id!r} is not held; staged: {stage and stage.stage_id}"
                )
            start = time.perf_counter()
            self._state = "committing"
            self._resumed.clear()
            try:
                await self._write(stage)
            finally:
                self._state = "ready"
                self._resumed.set()
            pause_ms = (time.perf_counter() - start) * 1e3
            self._receipt = CommitReceipt(
                ref=stage.target, pause_ms=pause_ms, num_changed=stage.update.num_changed
            )
            return self._receipt

    async def roll_back(self, to: VersionRef) -> None:
        async with self._verb("roll_back"):
            if self._undo is None or self._undo.base != to:
                have = self._undo and self._undo.base
                raise EngineError(f"cannot roll back to {to}: undo leads to {have}")
            self._undo.update.undo(self.weights)
            self._ref, self._undo = to, None

    async def discard(self) -> None:
        async with self._verb("discard"):
            self._staged = None

    async def verify(self, names: Sequence[str] | None = None) -> VerifyReport:
        async with self._verb("verify"):
            reader = self.weights if names is None else Subset(self.weights, names)
            state = DigestState.of(reader)
            specs = reader.schema.tensors
            tensors = {spec.name: state.tensor_digest(i) for i, spec in enumerate(specs)}
            digest = state.version_digest() if names is None else ""
            return VerifyReport(ref=self._ref, digest=digest, tensors=tensors)

    async def close(self) -> None:
        return None

    # --- generation ----------------------------------------------------------------------------

    async def generate(
        self, prompt: str, num_tokens: int, salt: str = ""
    ) -> AsyncGenerator[FakeToken, None]:
        """Yield tokens one by one, each from the version that is live at that moment."""
        self.running += 1
        finished = False
        try:
            await self._enter("generate")
            await self._resumed.wait()
            cached = self._cache is not None and (salt, prompt) in self._cache
            kv_ref = self._cache[salt, prompt] if self._cache and cached else self._ref
            if self._cache is not None:
                self._cache[salt, prompt] = kv_ref
            fresh = not cached
            for at in range(num_tokens):
                await self._token_time()
                # Without a cache hit the KV follows the weights, as far as this fake can tell.
                text = _word(prompt, self._ref, self._ref if fresh else kv_ref, at)
                yield FakeToken(
                    text=text,
                    token_id=int(text[1:], 16),
                    version=self._ref.version if self._ref else None,
                    cached=cached,
                )
            finished = True
        finally:
            self.running -= 1
            self.aborted += not finished

    async def _token_time(self) -> None:
        if self.faults.token_gate is not None:
            await self.faults.token_gate.acquire()
        await asyncio.sleep(self.faults.token_s)
        await self._resumed.wait()
        if self.dead:
            raise EngineUnreachableError("the engine died")

    # --- inside --------------------------------------------------------------------------------

    async def _enter(self, verb: str) -> None:
        if verb in self.faults.die_on:
            self.die()
        if self.dead:
            raise EngineUnreachableError(f"the engine is dead ({verb})")
        if verb in self.faults.hang:
            await self.faults.release.wait()

    @contextlib.asynccontextmanager
    async def _verb(self, verb: str) -> AsyncIterator[None]:
        """Serialise a mutating verb, with the faults that concern it."""
        async with self._order:
            await self._enter(verb)
            yield
            if verb in self.faults.lose_reply:
                self.faults.lose_reply.discard(verb)
                raise EngineUnreachableError(f"the reply to {verb} was lost")

    def die(self) -> None:
        """As if the process had been killed: nothing answers any more."""
        self.dead = True
        self._state = "failed"

    def _check(self, item: TensorUpdate) -> None:
        if not 0 <= item.tensor < len(self.weights.schema):
            raise EngineError(f"stage names tensor {item.tensor}, there are none so high")
        name = self.weights.schema.tensors[item.tensor].name
        words = self.weights.words_at(item.tensor)
        where: Any = item.positions
        if item.positions is None:
            where = slice(item.start, item.start + len(item.new))
        in_bounds = (
            item.start + len(item.new) <= len(words)
            if item.positions is None
            else not len(item.positions) or int(item.positions[-1]) < len(words)
        )
        if not in_bounds or item.new.dtype != words.dtype:
            raise EngineError(f"stage does not fit tensor {name}")
        if not (words[where] == item.old).all():
            raise EngineError(f"tensor {name}: the stage's old bits are not the live ones")

    async def _write(self, stage: _Stage) -> None:
        await asyncio.sleep(self.faults.pause_s)
        if self.faults.commit_gate is not None:
            await self.faults.commit_gate.acquire()
        if self.faults.commit_failures:
            self.faults.commit_failures -= 1
            half = UpdateSet(stage.update.updates[: max(1, len(stage.update.updates) // 2)])
            half.apply(self.weights)
            if self.faults.undo_fails:
                self.die()
                raise FatalReplicaError("commit failed and its undo failed: the engine exits")
            half.undo(self.weights)
            raise EngineError(f"commit of {stage.stage_id!r} failed (injected) and was undone")
        stage.update.apply(self.weights)
        self._ref, self._staged, self._undo = stage.target, None, stage


def fake_engine_app(engine: FakeEngine, token: str) -> web.Application:
    """The engine as an HTTP server: control interface, OpenAI routes, /health, lifecycle routes."""
    from stitch.testing.fake_server import build

    return build(engine, token)
