"""The vLLM plugin without a vLLM: command lines, RPCs over a fake client, the mounted routes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.engines.group.workers import WorkersLostError
from stitch.engines.vllm import WORKER_EXTENSION
from stitch.engines.vllm.__main__ import plugins
from stitch.engines.vllm.endpoint import StitchEndpoint
from stitch.engines.vllm.launch import vllm_command
from stitch.engines.vllm.workers import VllmWorkers
from stitch.engines.wire import PREFIX, TOKEN_ENV
from stitch.errors import UsageError
from stitch.types import VersionRef


class FakeClient:
    """vLLM's client as far as we use it; `spoil` turns the ranks' answers into others."""

    def __init__(self, world: int = 2) -> None:
        self.world = world
        self.log: list[Any] = []
        self.errored = False
        self.spoil: Any = lambda answers: answers
        self.polls = 0
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._clear)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:
        number, name, rest = args
        self.log.append((name, *rest))
        answers = []
        for rank in range(self.world):
            answer = {"ok": True, "call": number, "at_rank": rank}
            if name == "finish":
                self.polls += 1
                # Rank 1 needs longer than rank 0.
                answer |= {"running": True} if self.polls < 4 * (rank + 1) else {"done": rank}
            answers.append(answer)
        return self.spoil(answers)

    async def _pause(self, **how: Any) -> None:
        self.log.append(("pause", how))

    async def _clear(self) -> None:
        self.log.append(("clear_mm_cache",))

    async def resume_generation(self) -> None:
        self.log.append(("resume",))

    async def update_weight_version(self, version: str) -> None:
        self.log.append(("version", version))


async def test_quick_calls_are_one_rpc() -> None:
    client = FakeClient()
    answers = await VllmWorkers(client, 2).call("commit", "a")
    assert client.log == [("commit", "a")]
    assert [answer["ok"] for answer in answers] == [True, True]


async def test_long_calls_run_in_a_thread_of_each_rank_and_are_waited_for() -> None:
    client = FakeClient()
    answers = await VllmWorkers(client, 2).call("lanes", ["x"])
    name, ticket, method, args = client.log[0]
    assert (name, method, args) == ("begin", "lanes", [["x"]])
    assert set(client.log[1:]) == {("finish", ticket)}
    assert [answer["done"] for answer in answers] == [0, 1]


async def test_a_rank_that_cannot_begin_says_why_and_the_others_are_waited_for() -> None:
    client = FakeClient()
    refusal = {"ok": False, "type": "UsageError", "error": "busy"}

    def spoil(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if client.log[-1][0] == "begin":
            answers[0] |= refusal
        return answers

    client.spoil = spoil
    answers = await VllmWorkers(client, 2).call("lanes", ["x"])
    assert answers[0]["error"] == "busy"
    assert answers[1]["done"] == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answers: [answers[0], None],
        lambda answers: answers[:1],
        lambda answers: [answers[1], answers[0]],
        lambda answers: [answers[0], {**answers[1], "call": answers[1]["call"] - 1}],
    ],
)
async def test_answers_of_another_call_are_noticed(spoil: Any) -> None:
    client = FakeClient()
    client.spoil = spoil
    with pytest.raises(WorkersLostError, match="answers of other calls"):
        await VllmWorkers(client, 2).call("commit", "a")


async def test_an_rpc_that_raises_loses_the_answers() -> None:
    client = FakeClient()

    def broken(answers: Any) -> Any:
        raise RuntimeError("Worker failed")

    client.spoil = broken
    with pytest.raises(WorkersLostError, match="Worker failed"):
        await VllmWorkers(client, 2).call("commit", "a")


async def test_a_pause_keeps_requests_and_empties_the_caches() -> None:
    client = FakeClient()
    workers = VllmWorkers(client, 2, multimodal=True)
    await workers.pause()
    await workers.label(VersionRef("r", 7))
    await workers.resume()
    assert client.log == [
        ("clear_mm_cache",),
        ("pause", {"mode": "keep", "clear_cache": True}),
        ("version", "7"),
        ("resume",),
    ]
    assert workers.is_alive()
    client.errored = True
    assert not workers.is_alive()


def test_the_endpoint_mounts_the_control_interface_only_with_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted: dict[str, Any] = {}
    app = SimpleNamespace(
        mount=lambda prefix, it: mounted.update({prefix: it}), add_middleware=lambda it: None
    )
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    with pytest.raises(UsageError, match=TOKEN_ENV):
        StitchEndpoint().attach_router(app)
    monkeypatch.setenv(TOKEN_ENV, "too short")
    with pytest.raises(UsageError, match="16"):
        StitchEndpoint().attach_router(app)
    monkeypatch.setenv(TOKEN_ENV, "a control token for tests")
    StitchEndpoint().attach_router(app)
    assert list(mounted) == [PREFIX]


def test_the_command_line_passes_the_engines_own_arguments_on() -> None:
    command = vllm_command(
        "m", port=7, served_model_name="s", python="/e/python", args=["--x", "1"]
    )
    assert command[:4] == ["/e/python", "-m", "stitch.engines.vllm", "m"]
    assert command[-4:] == ["--dtype", "bfloat16", "--x", "1"]
    assert "--dtype" not in vllm_command("m", port=7, view="checkpoint")
    assert vllm_command("m", port=7, args=["--dtype=float16"]).count("--dtype") == 0
    with pytest.raises(UsageError, match="--port is the replica's"):
        vllm_command("m", port=7, args=["--port=8"])


def test_our_endpoint_is_allowed_without_locking_other_plugins_out() -> None:
    installed = [
        EntryPoint("lora", "x:y", "vllm.general_plugins"),
        EntryPoint("open", "x:y", "vllm.endpoint_plugins"),
        EntryPoint("other", "x:y", "console_scripts"),
        EntryPoint("stitch", "x:y", "vllm.general_plugins"),
    ]
    assert plugins(None, installed) == "lora,stitch"
    assert plugins("a,stitch", installed) == "a,stitch"
    assert plugins("", installed) == "stitch"


def test_loading_the_plugin_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, stitch.engines.vllm.endpoint, stitch.engines.vllm.plugin as plugin; "
        "plugin.register(); "
        "assert not {'vllm', 'torch', 'aiohttp', 'numba'} & set(sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_worker_extension_is_where_the_command_line_says() -> None:
    pytest.importorskip("torch")
    module, _, name = WORKER_EXTENSION.rpartition(".")
    __import__(module)
    extension = getattr(sys.modules[module], name)
    assert [name for name in dir(extension) if not name.startswith("__")] == ["stitch_call"]


def test_the_worker_extension_never_raises() -> None:
    pytest.importorskip("torch")
    from stitch.engines.vllm.worker import StitchWorkerExtension

    worker = StitchWorkerExtension()
    worker.rank = 3  # type: ignore[attr-defined]
    for method, args in [("__class__", []), ("learn", []), ("open", ["nowhere", "bf16"])]:
        answer = worker.stitch_call(5, method, args)
        assert (answer["ok"], answer["call"], answer["at_rank"]) == (False, 5, 3)
