"""Calls of the program in this process, and checkpoints that change as in training."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stitch.cli.main import main
from stitch.publish import Publisher
from stitch.tensors import HostWeights, open_checkpoint, read_all, write_checkpoint
from stitch.testing.synthetic import adam_step
from stitch.testing.tiny import tiny_checkpoint

DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one call left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return json.loads(self.out)


class Program:
    """`stitch`, called as a function."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> Outcome:
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self._capture.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    def ok(self, *arguments: object) -> Any:
        """A call that must succeed, with --json; returns the object."""
        outcome = self(*arguments, "--json")
        assert outcome.code == 0, outcome.err
        return outcome.json

    def fails(self, code: int, *arguments: object) -> str:
        """A call that must end with this code and one clear line; returns the line."""
        outcome = self(*arguments)
        assert outcome.code == code, (outcome.code, outcome.out, outcome.err)
        assert outcome.err.startswith("error: "), outcome.err
        assert outcome.err.count("\n") == 1, outcome.err
        assert "Traceback" not in outcome.err
        return outcome.err


@dataclass(frozen=True)
class Published:
    """A board whose run `math` has a chain of checkpoints as its versions."""

    board: Path
    chain: list[Path]

    @property
    def args(self) -> tuple[str, ...]:
        return ("--board", str(self.board))


def make_chain(folder: Path, *, num_steps: int = 3, dtype: str = "BF16") -> list[Path]:
    """Checkpoint directories step0 (a tiny model) to step<num_steps>, each a small step on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [tiny_checkpoint(folder / "step0", dtype=dtype)]
    with open_checkpoint(paths[0]) as base:
        weights = HostWeights.load(base)
    for step in range(1, num_steps + 1):
        adam_step(weights, 0.01, step).apply(weights)
        path = folder / f"step{step}"
        write_checkpoint(path, weights, assets_from=paths[0])
        paths.append(path)
    return paths


def publish(board: Path, chain: list[Path], first: int, last: int) -> None:
    """Publish steps of the chain into run `math`, which is started if need be."""
    with Publisher.open(board, "math", chain[0], threads=1) as publisher:
        for step in range(first, last + 1):
            with open_checkpoint(chain[step]) as checkpoint:
                publisher.publish(checkpoint, step=step).wait()


def wait_for(path: Path) -> None:
    """Until a file is there."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not appear"
        time.sleep(0.02)


def words_of(path: Path) -> dict[str, bytes]:
    """Tensor name -> its bytes."""
    with open_checkpoint(path) as checkpoint:
        return {name: read_all(checkpoint, name).tobytes() for name in checkpoint.schema.index}
