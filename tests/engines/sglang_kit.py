"""SGLang as far as the plugin touches it: schedulers in threads that go round together."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stitch.engines.sglang import scheduler as plugin

MESSAGES: Any = SimpleNamespace(
    PauseGenerationReqInput=lambda mode: ("pause", mode),
    ContinueGenerationReqInput=lambda torch_empty_cache: ("continue", torch_empty_cache),
    UpdateWeightVersionReqInput=lambda new_version, abort_all_requests: (
        "version",
        new_version,
        abort_all_requests,
    ),
)


class FakeScheduler:
    """One rank's. Every step that runs is counted, with whether it was in a pause."""

    def __init__(self, model: torch.nn.Module) -> None:
        runner = SimpleNamespace(model=model, device="cpu")
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.grammar_manager = SimpleNamespace(grammar_queue=["a request waits for its grammar"])
        self.is_paused = False
        self.in_use = False
        """Whether keys and values cannot be dropped."""
        self.flushes: list[Any] = []
        self.versions: list[str] = []
        self.steps = 0

    def do(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("pause", mode):
                assert mode == "retract"
                self.is_paused = True
                plugin.paused(None, self)
            case ("continue", empty):
                assert not empty
                self.is_paused = False
            case ("version", version, abort):
                assert not abort
                self.record_weight_version_change(version)
            case ("step",):
                self.steps += not self.is_paused

    def flush_cache(self, empty_cache: bool) -> bool:
        assert not empty_cache
        assert self.is_paused
        if self.in_use or self.grammar_manager.grammar_queue:
            return False
        self.flushes.append(self.versions[-1:])
        return True

    def record_weight_version_change(self, new_version: str) -> None:
        self.versions.append(new_version)


class FakeSglang:
    """The schedulers' loop, and the tokenizer manager that feeds it. `close` it."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.schedulers = [FakeScheduler(model) for model in models]
        self.version: str | None = None
        self._inbox: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._round: list[tuple[Any, ...]] = []
        self._together = threading.Barrier(len(models))
        self._threads = [
            threading.Thread(target=self._loop, args=(rank,), daemon=True)
            for rank in range(len(models))
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, rank: int) -> None:
        while True:
            if rank == 0:
                self._round = [self._inbox.get()]
            self._together.wait()  # every rank has this round's messages, as after a broadcast
            for message in self._round:
                if message == ("end",):
                    return
                self.schedulers[rank].do(message)
            self._together.wait()

    async def pause_generation(self, message: tuple[Any, ...]) -> None:
        self._inbox.put(message)

    async def continue_generation(self, message: tuple[Any, ...]) -> None:
        self._inbox.put(message)

    async def update_weight_version(self, message: tuple[Any, ...]) -> None:
        self._inbox.put(message)
        self.version = message[1]

    def _update_weight_version_if_provided(self, version: str) -> None:
        self.version = version

    def step(self) -> None:
        self._inbox.put(("step",))

    def close(self) -> None:
        """Ends the loop, when it has done all there is to do."""
        self._inbox.put(("end",))
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def stand_in(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    """Put modules of SGLang's that the plugin imports in its place: name -> content."""
    for name, content in contents.items():
        module: Any = ModuleType(f"sglang.{name.replace('__', '.')}")
        vars(module).update(content)
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], module, raising=False)
