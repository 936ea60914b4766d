"""What a demo run can be told, and what follows from it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUN = "demo"


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Which replicas there are. `late` joins when others serve; `killed` is killed and restarted.

    patience: how many times as long as the embedded engine such an engine takes to start, about;
    the trainer's steps are as many times slower and more. rest_s: between long requests to a tiny
    model, which would else take all of the cores that others need for starting.
    """

    early: tuple[str, ...]
    late: str
    killed: str
    patience: int
    rest_s: float

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.early, self.late)

    def joined(self, name: str) -> str:
        return {self.late: "late", self.killed: "restarted"}.get(name, "start")


CASTS = {
    "embedded": Cast(early=("r1", "r2"), late="r3", killed="r2", patience=1, rest_s=0.2),
    "vllm": Cast(early=("r1",), late="r2", killed="r1", patience=4, rest_s=6.0),
}
"""By kind of engine. A vLLM takes 2.5 GB and half a minute of a core to start: two must do."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Choices of `stitch demo`."""

    tiny: bool = False
    """A small random model instead of a real one."""
    model: str | None = None
    """A model directory or a hub name; None: SmolLM2-135M-Instruct."""
    engine: str = "embedded"
    """What the replicas serve with; one of CASTS."""
    engine_python: Path | None = None
    """Interpreter of the environment that the engine is installed in; None: this one."""
    steps: int = 8
    """Optimiser steps, and versions, at least."""
    work: Path | None = None
    """Where board and logs go; None: a temporary directory, removed after a good end."""
    report: Path = Path("demo-report.json")


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """What the trainer process is told, as JSON."""

    board: str
    run: str
    model: str
    events: str
    """JSON lines that the trainer writes for the supervisor."""
    enough: str
    """A file whose existence tells the trainer that `steps` will do."""
    num_replicas: int
    """Replicas to wait for before the first request."""
    steps: int
    max_steps: int
    min_step_s: float
    """A step takes at least this long; keeps a tiny model from outrunning the replicas' starts."""
    num_problems: int = 4
    group_size: int = 4
    max_tokens: int = 12
    seed: int = 0
    threads: int = 1
    deadline_s: float = 240.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def spare_cpus(taken: int) -> int:
    """CPUs that this process may use beyond `taken`, at least 1 and at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - taken))
