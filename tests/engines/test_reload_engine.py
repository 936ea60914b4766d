"""The port over stock engines: the contract, and what comes of each failure of theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from engine_kit import Served
from reload_kit import (
    MemoryStock,
    ToyEngine,
    digest_of,
    load,
    sglang_app,
    small_model,
    vllm_app,
)

from stitch.engines.reload.engine import ReloadEngine
from stitch.engines.reload.generations import Generations
from stitch.engines.reload.sglang import StockSglang
from stitch.engines.reload.stock import StockLostError, StockRefusedError
from stitch.engines.reload.vllm import StockVllm
from stitch.errors import EngineError, EngineUnreachableError, FatalReplicaError, UsageError
from stitch.tensors import HostWeights
from stitch.testing.engine_contract import (
    AFTER,
    BASE,
    NEXT,
    EngineContract,
    Subject,
    flip_update,
)
from stitch.types import VersionRef

Flavour = tuple[Callable[[ToyEngine], web.Application], Callable[..., Any]]
FLAVOURS: dict[str, Flavour] = {"vllm": (vllm_app, StockVllm), "sglang": (sglang_app, StockSglang)}


@dataclass
class Toy:
    """An engine under test, what it runs on, and the weights that it should hold."""

    engine: ReloadEngine
    toy: ToyEngine
    weights: HostWeights
    place: Path
    url: str

    async def bound(self) -> None:
        await self.engine.bind(BASE, digest_of(self.weights))

    async def staged(self, stage_id: str = "a", base: VersionRef = BASE) -> Any:
        update = flip_update(self.weights, 1)
        await self.engine.stage(stage_id, base, VersionRef(base.run, base.version + 1), update)
        return update

    @property
    def generations(self) -> list[str]:
        return sorted(p.name for p in (self.place / "engine" / "generations").iterdir())

    def holds(self, weights: HostWeights) -> bool:
        """Whether the engine's own copy is that, word for word."""
        return digest_of(self.toy.weights) == digest_of(weights)


@asynccontextmanager
async def running(
    flavour: str,
    place: Path,
    *,
    ranks: int = 1,
    tied: bool = False,
    prepare: Callable[[ToyEngine], None] = lambda toy: None,
) -> AsyncIterator[Toy]:
    """A stock engine of a kind, started on the base, and the port over it."""
    model = small_model(place / "model", tied=tied)
    app, stock = FLAVOURS[flavour]
    generations = Generations.open(place / "engine", model, "bf16", run="contract", threads=1)
    toy = ToyEngine(generations.link, ranks=ranks)
    prepare(toy)
    async with Served(app(toy)) as url:
        one = stock(url, token=None, timeout_s=20.0)
        try:
            engine = await ReloadEngine.opened(one, generations, fresh=True)
        except BaseException:
            await one.close()
            generations.close()
            raise
        yield Toy(engine, toy, load(model), place, url)
        await engine.close()


async def attached(flavour: str, it: Toy, run: str = "contract") -> ReloadEngine:
    """Another replica takes the engine over; `it` is closed."""
    await it.engine.close()
    generations = Generations.open(
        it.place / "engine", it.place / "model", "bf16", run=run, threads=1
    )
    stock = FLAVOURS[flavour][1](it.url, token=None, timeout_s=20.0)
    try:
        return await ReloadEngine.opened(stock, generations, fresh=False)
    except BaseException:
        await stock.close()
        generations.close()
        raise


@pytest.fixture(params=["vllm", "sglang"])
def flavour(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
async def it(flavour: str, tmp_path: Path) -> AsyncIterator[Toy]:
    async with running(flavour, tmp_path) as toy:
        yield toy


class TestContract(EngineContract):
    @pytest.fixture(params=["vllm", "sglang"])
    async def subject(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> AsyncIterator[Subject]:
        async with running(request.param, tmp_path) as toy:
            yield Subject(engine=toy.engine, weights=toy.weights)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_commit_reaches_the_engine_and_leaves_two_generations(
    flavour: str, ranks: int, tmp_path: Path
) -> None:
    async with running(flavour, tmp_path, ranks=ranks) as it:
        await it.bound()
        update = await it.staged()
        assert it.holds(it.weights)
        await it.engine.commit("a")
        update.apply(it.weights)
        assert it.holds(it.weights)
        assert it.toy.label == "contract@1"
        assert not it.toy.paused
        assert len(it.generations) == 2  # the old one can be gone back to
        await it.engine.stage("b", NEXT, AFTER, flip_update(it.weights, 2))
        assert len(it.generations) == 2
        await it.engine.discard()
        assert len(it.generations) == 1


async def test_the_engine_is_told_one_path_for_ever(it: Toy, flavour: str) -> None:
    await it.bound()
    await it.staged()
    await it.engine.commit("a")
    link = it.place / "engine" / "current"
    assert link.resolve().name == it.generations[-1]
    assert it.toy.directory == link
    assert (await it.engine.describe()).salt_field == (
        "cache_salt" if flavour == "vllm" else "extra_key"
    )


async def test_a_failed_load_is_taken_back_and_serving_goes_on(it: Toy) -> None:
    await it.bound()
    await it.staged()
    it.toy.faults.refuse_loads = 1
    with pytest.raises(EngineError, match="went back"):
        await it.engine.commit("a")
    assert it.holds(it.weights)
    assert not it.toy.paused
    assert (await it.engine.describe()).ref == BASE
    assert len(it.generations) == 1
    update = await it.staged("b")
    await it.engine.commit("b")
    update.apply(it.weights)
    assert it.holds(it.weights)


async def test_a_load_that_leaves_something_out_is_noticed_though_it_reports_success(
    it: Toy,
) -> None:
    await it.bound()
    await it.staged()
    it.toy.faults.mix = True
    with pytest.raises(EngineError, match=r"gate_up_proj|up_proj"):
        await it.engine.commit("a")
    assert it.holds(it.weights)
    assert (await it.engine.describe()).ref == BASE


@pytest.mark.parametrize("fault", ["twice", "lost"])
async def test_an_engine_in_doubt_is_left_paused_and_not_taken_again_until_restarted(
    it: Toy, flavour: str, fault: str
) -> None:
    await it.bound()
    update = await it.staged()
    it.toy.faults.refuse_loads = 2 if fault == "twice" else 0
    it.toy.faults.lose_load = fault == "lost"
    with pytest.raises(FatalReplicaError, match="in doubt"):
        await it.engine.commit("a")
    assert it.toy.paused
    assert (await it.engine.describe()).state == "failed"
    with pytest.raises(FatalReplicaError):
        await it.engine.stage("b", BASE, NEXT, flip_update(it.weights, 2))
    current = load(it.place / "engine" / "current")
    with pytest.raises(FatalReplicaError):
        await it.engine.bind(NEXT if fault == "lost" else BASE, digest_of(current))
    it.toy.faults.lose_load = False
    with pytest.raises(FatalReplicaError, match="earlier fault"):
        await attached(flavour, it)
    it.toy.restart()
    engine = await attached(flavour, it)
    found = await engine.describe()
    if fault == "lost":  # it became current before the engine was told
        update.apply(it.weights)
    assert found.ref == (NEXT if fault == "lost" else BASE)
    assert (await engine.verify()).digest == digest_of(it.weights)
    assert it.holds(it.weights)
    await engine.close()


async def test_an_engine_in_doubt_is_paused_even_if_that_cannot_be_noted(
    it: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is what fails a commit and then the note of it."""
    await it.bound()
    await it.staged()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stitch.engines.reload.generations.os.replace", full)
    with pytest.raises(FatalReplicaError, match=r"in doubt.*No space left"):
        await it.engine.commit("a")
    assert it.toy.paused
    assert not (it.place / "engine" / "doubt.json").exists()


async def test_two_ranks_of_vllm_after_a_failed_call_are_not_trusted(tmp_path: Path) -> None:
    async with running("vllm", tmp_path, ranks=2) as it:
        await it.bound()
        await it.staged()
        it.toy.faults.refuse_loads = 1
        with pytest.raises(FatalReplicaError, match="ranks hold is not known"):
            await it.engine.commit("a")
        assert it.toy.paused


async def failing(*_: object) -> Any:
    raise StockRefusedError("planned")


@pytest.mark.parametrize(
    ("method", "verb"),
    [
        ("set_label", "bind"),
        ("label", "bind"),
        ("checksums", "verify"),
        ("answers", "commit"),
    ],
)
async def test_an_engine_that_does_not_do_what_must_not_fail_is_in_doubt(
    it: Toy, flavour: str, method: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.bound()
    await it.staged()
    verbs: dict[str, Callable[[], Any]] = {
        "bind": it.bound,
        "verify": it.engine.verify,
        "commit": lambda: it.engine.commit("a"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(it.engine._reloader.stock, method, failing)
        with pytest.raises(FatalReplicaError, match=r"in doubt.*planned"):
            await verbs[verb]()
    assert it.toy.paused
    assert (await it.engine.describe()).state == "failed"
    with pytest.raises(FatalReplicaError, match="earlier fault"):
        await attached(flavour, it)


async def test_an_engine_whose_reloads_cannot_be_proven_is_in_doubt(
    it: Toy, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.bound()
    stock = FLAVOURS[flavour][1]
    with monkeypatch.context() as patch:
        patch.setattr(stock, "checksums", failing)
        with pytest.raises(FatalReplicaError, match=r"could not be proven.*planned"):
            await attached(flavour, it)
    with pytest.raises(FatalReplicaError, match="earlier fault"):
        await attached(flavour, it)


async def test_an_engine_that_says_that_it_failed_has_failed(
    it: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.bound()
    monkeypatch.setattr(it.engine._reloader.stock, "label", failing)
    assert (await it.engine.describe()).state == "failed"


async def test_a_pause_that_fails_changes_nothing(it: Toy) -> None:
    await it.bound()
    await it.staged()
    it.toy.faults.refuse_pauses = 1
    with pytest.raises(EngineError, match="did not pause"):
        await it.engine.commit("a")
    assert it.holds(it.weights)
    assert (await it.engine.describe()).ref == BASE
    update = await it.staged("b")
    await it.engine.commit("b")
    update.apply(it.weights)
    assert it.holds(it.weights)


async def test_an_engine_that_does_not_go_on_or_computes_nothing_is_in_doubt(
    flavour: str, tmp_path: Path
) -> None:
    async with running(flavour, tmp_path) as it:
        await it.bound()
        await it.staged()
        if flavour == "vllm":
            it.toy.faults.stay_paused = True
        else:
            it.toy.faults.not_finite = True
        with pytest.raises(FatalReplicaError, match="in doubt"):
            await it.engine.commit("a")


async def test_a_prefix_cache_that_stays_is_a_failed_load(tmp_path: Path) -> None:
    async with running("vllm", tmp_path) as it:
        await it.bound()
        await it.staged()
        it.toy.faults.keep_cache = True
        with pytest.raises(FatalReplicaError, match="keys and values"):
            await it.engine.commit("a")


@pytest.mark.parametrize("tied", [False, True])
async def test_an_engine_that_computes_with_a_copy_of_its_head_is_refused(
    flavour: str, tied: bool, tmp_path: Path
) -> None:
    def prepare(toy: ToyEngine) -> None:
        toy.faults.packed = toy.faults.stale_head = True

    with pytest.raises(FatalReplicaError, match="engine-mode plugin"):
        async with running(flavour, tmp_path, tied=tied, prepare=prepare):
            pass
    assert len(list((tmp_path / "engine" / "generations").iterdir())) == 1


@pytest.mark.parametrize("fault", ["packed", "odd_hash"])
async def test_where_checksums_explain_little_answers_prove_a_reload(
    flavour: str, fault: str, tmp_path: Path
) -> None:
    def prepare(toy: ToyEngine) -> None:
        setattr(toy.faults, fault, True)

    async with running(flavour, tmp_path, prepare=prepare) as it:
        await it.bound()
        update = await it.staged()
        await it.engine.commit("a")
        update.apply(it.weights)
        assert it.holds(it.weights)
        await it.engine.roll_back(BASE)
        assert (await it.engine.verify()).ref == BASE


async def test_a_parameter_that_does_not_follow_its_tensors_is_noticed(
    flavour: str, tmp_path: Path
) -> None:
    """Also where the engine hashes in a way of its own."""

    def prepare(toy: ToyEngine) -> None:
        toy.faults.odd_hash = True

    async with running(flavour, tmp_path, prepare=prepare) as it:
        await it.bound()
        await it.staged()
        name = "model.layers.0.input_layernorm.weight"
        stuck = it.toy.weights.words(name).copy()
        app_load = it.toy.load

        def load(directory: Path, label: str) -> bool:
            done = app_load(directory, label)
            it.toy.weights.words(name)[:] = stuck
            return done

        it.toy.load = load  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"input_layernorm.*did not change"):
            await it.engine.commit("a")


async def test_weights_that_change_behind_our_back_end_it(it: Toy) -> None:
    await it.bound()
    assert (await it.engine.verify()).digest == digest_of(it.weights)
    it.toy.weights.words("model.norm.weight")[3] ^= 1
    with pytest.raises(FatalReplicaError, match=r"model\.norm\.weight"):
        await it.engine.verify()


async def test_a_damaged_directory_ends_it(it: Toy) -> None:
    await it.bound()
    (file,) = (it.place / "engine" / "current").resolve().glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(FatalReplicaError, match="damaged"):
        await it.engine.verify()


async def test_a_restarted_engine_is_another_one_until_it_is_bound_again(it: Toy) -> None:
    await it.bound()
    update = await it.staged()
    await it.engine.commit("a")
    update.apply(it.weights)
    before = await it.engine.describe()
    it.toy.directory = it.place / "model"  # started on the base again, by somebody else
    it.toy.restart()
    after = await it.engine.describe()
    assert after.boot != before.boot
    with pytest.raises(EngineError):
        await it.engine.verify()
    await it.engine.bind(NEXT, digest_of(it.weights))
    assert it.holds(it.weights)
    assert (await it.engine.verify()).ref == NEXT


async def test_a_look_that_a_commit_overtakes_finds_no_restart(
    it: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label that it was told is old, or comes before we know that the commit happened."""
    await it.bound()
    await it.staged()
    boot = (await it.engine.describe()).boot
    stock = it.engine._reloader.stock
    asked, told = asyncio.Event(), asyncio.Event()
    label = stock.label

    async def slow() -> str:
        found = await label()
        asked.set()
        await told.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stock, "label", slow)
        look = asyncio.create_task(it.engine.describe())
        await asked.wait()
    await it.engine.commit("a")
    told.set()
    found = await look
    assert (found.boot, found.ref, found.state) == (boot, NEXT, "ready")
    assert (await it.engine.verify()).ref == NEXT


async def test_a_restart_during_a_stage_is_noticed_before_the_commit(it: Toy) -> None:
    await it.bound()
    await it.staged()
    it.toy.restart()
    with pytest.raises(EngineError, match="restarted"):
        await it.engine.commit("a")


async def test_an_engine_that_is_gone_before_a_commit_leaves_no_generation(
    it: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone() -> str:
        raise StockLostError("planned")

    await it.bound()
    await it.staged()
    with monkeypatch.context() as patch:
        patch.setattr(it.engine._reloader.stock, "label", gone)
        with pytest.raises(EngineUnreachableError):
            await it.engine.commit("a")
    assert len(it.generations) == 1
    update = await it.staged("b")
    await it.engine.commit("b")
    update.apply(it.weights)
    assert it.holds(it.weights)


async def test_a_proof_after_a_restart_needs_room_for_one_more_generation_only(
    flavour: str, tmp_path: Path
) -> None:
    """Also if the engine restarts while an old generation and the next one are kept."""
    seen: list[int] = []
    async with running(
        flavour, tmp_path, prepare=lambda toy: setattr(toy.faults, "packed", True)
    ) as it:
        await it.bound()
        update = await it.staged()
        await it.engine.commit("a")
        update.apply(it.weights)
        it.toy.restart()
        await it.engine.describe()
        app_load = it.toy.load

        def load(directory: Path, label: str) -> bool:
            seen.append(len(it.generations))
            return app_load(directory, label)

        it.toy.load = load  # type: ignore[method-assign]
        await it.engine.bind(NEXT, digest_of(it.weights))
    assert seen == [1, 2, 2]


async def test_another_replica_takes_a_running_engine_over(it: Toy, flavour: str) -> None:
    """Whatever it holds by then: it was paused half-way when the first one was killed."""
    await it.bound()
    update = await it.staged()
    await it.engine.commit("a")
    update.apply(it.weights)
    it.toy.paused, it.toy.label = True, "contract@1"
    it.toy.weights.words("model.norm.weight")[:] = 0
    engine = await attached(flavour, it)
    found = await engine.describe()
    assert (found.ref, found.state) == (NEXT, "ready")
    assert not it.toy.paused
    assert it.holds(it.weights)
    await engine.bind(NEXT, digest_of(it.weights))
    await engine.close()


async def test_generations_of_another_run_are_not_taken(it: Toy, flavour: str) -> None:
    await it.bound()
    await it.staged()
    await it.engine.commit("a")
    engine = await attached(flavour, it, run="another")
    assert (await engine.describe()).ref is None
    assert it.holds(it.weights)  # the base
    await engine.close()


async def test_an_engine_that_is_gone_is_unreachable(it: Toy, tmp_path: Path) -> None:
    stock = StockVllm("http://127.0.0.1:9", token=None, timeout_s=1.0)
    generations = Generations.open(tmp_path / "other", it.place / "model", "bf16", run="r")
    with pytest.raises(EngineUnreachableError):
        await ReloadEngine.opened(stock, generations, fresh=False)
    await stock.close()
    generations.close()


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("vllm", {"parallel_config": {"data_parallel_size": 2}}, "data-parallel"),
        ("vllm", {"lora_config": {"max_loras": 1}}, "LoRA"),
        ("vllm", {"speculative_config": {"model": "x"}}, "speculative-config"),
        ("vllm", {"model_config": {"quantization": "fp8"}}, "quantised"),
        ("sglang", {"dp_size": 2}, "dp-size"),
        ("sglang", {"enable_lora": True}, "LoRA"),
        ("sglang", {"quantization": "fp8"}, "quantised"),
        ("sglang", {"speculative_algorithm": "EAGLE"}, "draft"),
    ],
)
async def test_settings_under_which_a_reload_is_not_to_be_trusted_are_refused(
    kind: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        async with running(kind, tmp_path, prepare=lambda toy: toy.settings.update(settings)):
            pass


async def test_a_vllm_without_control_routes_is_told_how_to_start(tmp_path: Path) -> None:
    async def not_found(_: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", not_found)
    generations = Generations.open(
        tmp_path / "engine", small_model(tmp_path / "model"), "bf16", run="r"
    )
    async with Served(app) as url:
        stock = StockVllm(url, token=None, timeout_s=5.0)
        with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            await ReloadEngine.opened(stock, generations, fresh=False)
        await stock.close()
    generations.close()


async def test_a_note_of_doubt_that_cannot_be_read_is_not_ignored(tmp_path: Path) -> None:
    toy_model = small_model(tmp_path / "model")
    generations = Generations.open(tmp_path / "engine", toy_model, "bf16", run="r")
    (tmp_path / "engine" / "doubt.json").write_text(json.dumps({"labels": 7})[:-2])
    stock = MemoryStock(ToyEngine(generations.link))
    with pytest.raises(FatalReplicaError, match=r"doubt\.json"):
        await ReloadEngine.opened(stock, generations, fresh=False)
    generations.close()
