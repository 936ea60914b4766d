"""Stock engines without our plugin, brought to versions by reloading checkpoints.

The test modules bind `OnStockEngine` and `ServedByReloads` to an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from equality import at, equal_to_fresh_engines_after_1_and_20_patches
from real_kit import PROMPTS, QUIET, START_S, RealEngine, digest_of, greedy, wait_for_the_end_of
from real_models import load, make_model, real_change
from requests_suite import LONG_PROMPT
from serve_suite import Replica, publish, serving, spans_a_commit, tokens

from stitch.board import open_board
from stitch.engines.group.ending import descendants
from stitch.engines.launch import EngineProcess, free_port
from stitch.engines.reload.engine import ReloadEngine
from stitch.engines.reload.generations import Generations
from stitch.engines.reload.launch import stock_command, stock_environment
from stitch.errors import EngineError, FatalReplicaError
from stitch.publish import Publisher
from stitch.replica.reload_host import STOCK
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import NUM_TOKENS, EngineContract, Subject

RUN = "reloads"
SHORT_PROMPT = [5, 6, 7]


@dataclass
class Live:
    """A stock engine that a ReloadEngine looks after."""

    engine: ReloadEngine
    url: str
    weights: HostWeights
    salt: str


async def ask(url: str, prompt: Sequence[int], num_tokens: int = 24, **more: Any) -> list[int]:
    """Greedy tokens."""
    body = greedy(prompt, num_tokens, **more)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        found: list[int] = (await response.json())["choices"][0]["token_ids"]
        return found


async def answers(url: str) -> list[list[int]]:
    return [await ask(url, prompt) for prompt in (*PROMPTS, LONG_PROMPT)]


@contextlib.asynccontextmanager
async def started(
    kind: type[RealEngine],
    directory: Path,
    log: Path,
    *,
    tp: int = 1,
    view: str = "bf16",
    args: tuple[str, ...] = (),
) -> AsyncIterator[str]:
    """A stock engine on a directory; its address."""
    ranks, environment = kind.on_ranks(tp)
    port = free_port()
    command = stock_command(
        kind.name,
        directory,
        port=port,
        served_model_name="tiny",
        python=kind.python(),
        view=view,
        args=[*kind.args, *ranks, *args],
    )
    process = await EngineProcess.start(
        command,
        base_url=f"http://127.0.0.1:{port}",
        env={**QUIET, **kind.env, **environment, **stock_environment(kind.name)},
        ready_timeout_s=START_S,
        log_path=log,
        plugin=False,
        least_grace_s=30.0,
    )
    try:
        yield process.base_url
    finally:
        await process.stop()


@contextlib.asynccontextmanager
async def reloading(
    kind: type[RealEngine], model: Path, place: Path, **settings: Any
) -> AsyncIterator[Live]:
    """A stock engine, started on generations of `model`, and the port over it."""
    await asyncio.to_thread(place.mkdir, exist_ok=True)
    generations = Generations.open(
        place / "engine", model, settings.get("view", "bf16"), run=RUN, threads=1
    )
    try:
        async with started(kind, generations.link, place / "log", **settings) as url:
            stock = STOCK[kind.name](url, token=None, timeout_s=120.0)
            try:
                engine = await ReloadEngine.opened(stock, generations, fresh=True)
                yield Live(engine, url, load(generations.link), stock.traits.salt_field)
            finally:
                await stock.close()
    finally:
        generations.close()


class OnStockEngine(EngineContract):
    """The engine contract, and what only this way of changing weights can get wrong."""

    engine: ClassVar[type[RealEngine]]
    kind: ClassVar[str]
    tp: ClassVar[int]
    goes_back: ClassVar[bool] = True
    """After a reload that failed; else it is in doubt then, and of no further use."""

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
        """An engine for the whole class, and its directory; each test attaches anew."""
        place = tmp_path_factory.mktemp(f"reload-{cls.kind}-{cls.tp}")
        model = make_model(cls.kind, place / "model")
        with asyncio.Runner() as runner:
            serving = started(cls.engine, model, place / "log", tp=cls.tp)
            url = runner.run(serving.__aenter__())
            yield place, url
            runner.run(serving.__aexit__(None, None, None))

    @pytest.fixture
    async def live(self, place: tuple[Path, str]) -> AsyncIterator[Live]:
        """Whatever the engine holds from the test before, a new replica takes it to the base."""
        directory, url = place
        generations = Generations.open(
            directory / "engine", directory / "model", "bf16", run="none-of-these", threads=1
        )
        stock = STOCK[self.engine.name](url, token=None, timeout_s=120.0)
        try:
            engine = await ReloadEngine.opened(stock, generations, fresh=False)
            yield Live(engine, url, load(generations.link), stock.traits.salt_field)
            await engine.close()
        finally:
            await stock.close()
            generations.close()

    @pytest.fixture
    async def subject(self, live: Live) -> Subject:
        return Subject(engine=live.engine, weights=live.weights)

    async def test_tokens_equal_those_of_a_fresh_engine_after_1_and_20_patches(
        self, place: tuple[Path, str], live: Live, tmp_path: Path
    ) -> None:
        async def fresh(checkpoint: Path) -> list[list[int]]:
            async with started(self.engine, checkpoint, tmp_path / "log", tp=self.tp) as url:
                return await answers(url)

        base = place[0] / "model"
        await equal_to_fresh_engines_after_1_and_20_patches(
            live.engine, live.weights, base, tmp_path, lambda: answers(live.url), fresh
        )

    async def test_a_stream_goes_on_over_a_reload_and_old_caches_are_not_used(
        self, live: Live
    ) -> None:
        if self.kind == "tied":
            pytest.skip("a tied head of random weights repeats one token in every version")
        await live.engine.bind(at(0), digest_of(live.weights))
        old = await ask(live.url, LONG_PROMPT)
        assert await ask(live.url, LONG_PROMPT) == old  # from the cache now
        before = await ask(live.url, SHORT_PROMPT, NUM_TOKENS)
        await live.engine.stage("to-1", at(0), at(1), real_change(live.weights, seed=1))
        tokens, committed_after = await stream_over(live, "to-1")
        assert len(tokens) == NUM_TOKENS
        assert 0 < committed_after < NUM_TOKENS
        assert tokens[:committed_after] == before[:committed_after]
        assert tokens != before  # the last ones are new
        assert tokens != await ask(live.url, SHORT_PROMPT, NUM_TOKENS)  # the first ones are old
        new = await ask(live.url, LONG_PROMPT)
        assert new == await ask(live.url, LONG_PROMPT, **{live.salt: "never seen"}) != old

    async def test_damage_that_the_engine_does_not_notice_is_never_served(
        self, place: tuple[Path, str], live: Live
    ) -> None:
        """What it loads was damaged after it was proven, and the engine reports success. The last
        test of all, as the engine may end up in doubt."""
        await live.engine.bind(at(0), digest_of(live.weights))
        before = await answers(live.url)
        await live.engine.stage("a", at(0), at(1), real_change(live.weights, seed=1))
        built = max((place[0] / "engine" / "generations").iterdir())
        (file,) = built.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-2] ^= 0x10
        file.write_bytes(bytes(data))
        if not self.goes_back:
            with pytest.raises(FatalReplicaError, match="in doubt"):
                await live.engine.commit("a")
            return
        with pytest.raises(EngineError, match="went back"):
            await live.engine.commit("a")
        assert (await live.engine.describe()).ref == at(0)
        assert (await live.engine.verify()).digest == digest_of(live.weights)
        assert await answers(live.url) == before


async def stream_over(live: Live, stage_id: str) -> tuple[list[int], int]:
    """The tokens of a long stream, and how many had come when the commit was over."""
    tokens: list[int] = []
    committed_after = 0
    body = greedy(SHORT_PROMPT, NUM_TOKENS, stream=True)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{live.url}/v1/completions", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"] or []
            if tokens and not committed_after:
                await live.engine.commit(stage_id)
                committed_after = len(tokens)
    return tokens, committed_after


class ServedByReloads:
    """`stitch serve --engine-mode reload`: a replica whose engine has no plugin."""

    engine: ClassVar[type[RealEngine]]

    async def test_a_replica_reloads_its_engine_is_killed_and_goes_on(self, tmp_path: Path) -> None:
        model, board = make_model("untied", tmp_path / "model"), tmp_path / "board"
        weights = load(model)
        flags = ["--engine-mode", "reload", "--engine-dir", str(tmp_path / "engine")]
        with Publisher.start(open_board(board), "r", model, threads=1) as publisher:
            for version in (1, 2):
                await asyncio.to_thread(publish, publisher, weights, version)
            async with serving(
                self.engine, board, model, tmp_path / "errors", flags=flags
            ) as replica:
                await replica.serves(2, START_S)
                await proven(replica, weights, 2)
                await spans_a_commit(replica, publisher, weights)
                for path in self.engine.control:
                    assert (await replica.post(path, {}))[0] == 403
                answers = [await tokens(replica, prompt) for prompt in PROMPTS]
                below = descendants(replica.process.pid)
                replica.process.kill()
                await replica.process.wait()
                wait_for_the_end_of(below)
            async with serving(
                self.engine, board, model, tmp_path / "again", flags=flags
            ) as replica:
                await replica.serves(3, START_S)
                assert [await tokens(replica, prompt) for prompt in PROMPTS] == answers
        assert "ref=r@3" in (tmp_path / "again").read_text()  # not from the base

    async def test_a_replica_attaches_to_an_engine_that_runs_already(self, tmp_path: Path) -> None:
        model, board = make_model("untied", tmp_path / "model"), tmp_path / "board"
        weights = load(model)
        with Publisher.start(open_board(board), "r", model, threads=1) as publisher:
            await asyncio.to_thread(publish, publisher, weights, 1)
            async with started(self.engine, model, tmp_path / "log") as url:
                flags = ["--engine-mode", "reload", "--engine-dir", str(tmp_path / "engine")]
                flags += ["--engine-url", url]
                for life in ("one", "another"):
                    async with serving(
                        self.engine, board, model, tmp_path / life, flags=flags, args=()
                    ) as replica:
                        await replica.serves(1, START_S)
                        await proven(replica, weights, 1)


async def proven(replica: Replica, weights: HostWeights, version: int) -> None:
    """Answers are stamped, and the engine's weights are those of the version."""
    status, answer = await replica.post("/v1/completions", greedy([5, 6, 7], 4))
    assert status == 200, answer
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (version, version)
    status, report = await replica.post("/verify", {})
    assert (status, report["digest"]) == (200, digest_of(weights))
