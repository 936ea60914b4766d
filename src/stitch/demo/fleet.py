"""The demo's processes: the trainer, and replicas with engines of the chosen kind."""

from __future__ import annotations

import json
from pathlib import Path

from stitch.board import Board, open_board
from stitch.demo.events import EventReader
from stitch.demo.processes import Child, child_environment, stop_all
from stitch.demo.settings import CASTS, RUN, DemoSettings, TrainerPlan, spare_cpus

VLLM_ARGS = ("--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "16")
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all of them take the same core
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class Fleet:
    """The demo's processes. Leaving the `with` block ends all of them."""

    def __init__(self, settings: DemoSettings, work: Path, model: Path) -> None:
        self.settings = settings
        self.cast = CASTS[settings.engine]
        self.work = work
        self.model = model
        self.board_dir = work / "board"
        self.enough = work / "enough"
        self.events = EventReader(work / "trainer-events.jsonl")
        self.children: dict[str, Child] = {}
        self._all: list[Child] = []
        self.board: Board = open_board(self.board_dir)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(self._all)

    def start_trainer(self) -> None:
        threads = spare_cpus(taken=2)
        plan = self.work / "trainer-plan.json"
        plan.write_text(json.dumps(self._plan(threads).to_json(), indent=1), encoding="utf-8")
        self._start("trainer", "stitch.demo.trainer", [str(plan)], child_environment(threads))

    def start_replica(self, name: str) -> None:
        args = ["serve", "--engine", self.settings.engine, "--board", str(self.board_dir)]
        args += ["--run", RUN, "--model", str(self.model), "--replica-id", name, "--port", "0"]
        args += ["--poll-interval-s", "0.2", "--heartbeat-interval-s", "1"]
        args += ["--threads", "1", "--dtype", "auto"]
        environment = child_environment()
        if self.settings.engine == "vllm":
            environment |= VLLM_ENVIRONMENT
            if self.settings.engine_python is not None:
                args += ["--engine-python", str(self.settings.engine_python)]
            args += ["--", *VLLM_ARGS]
        self._start(name, "stitch.cli", args, environment)

    def _start(self, name: str, module: str, args: list[str], environment: dict[str, str]) -> None:
        child = Child(name, module, args, self.work / f"{name}.log", environment)
        self.children[name] = child
        self._all.append(child)

    def _plan(self, threads: int) -> TrainerPlan:
        settings = self.settings
        return TrainerPlan(
            board=str(self.board_dir),
            run=RUN,
            model=str(self.model),
            events=str(self.work / "trainer-events.jsonl"),
            enough=str(self.enough),
            num_replicas=len(self.cast.early),
            steps=settings.steps,
            max_steps=settings.steps * self.cast.patience * (3 if settings.tiny else 2),
            min_step_s=self.cast.patience * (1.0 if settings.tiny else 0.0),
            max_tokens=12,
            threads=threads,
        )
