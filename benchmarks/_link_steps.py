"""Versions for the link benchmark: real steps of training, or simulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks._catchup_steps import training
from benchmarks._codec_data import Step, Synthetic, real_steps, side_by_side
from stitch.tensors import HostWeights

NUM_SIMULATED = 1000


def versions(folder: Path | None, num_elements: int) -> tuple[str, Iterator[HostWeights]]:
    """What they are, and the weights of version 0, 1, 2 ...; without a folder, synthetic ones."""
    if folder is not None:
        steps = list(real_steps(folder))
        return f"{len(steps)} real steps side by side", _side_by_side(steps)
    start = Synthetic(num_elements).old
    return "simulated from synthetic weights", _simulated(start)


def _side_by_side(steps: list[Step]) -> Iterator[HostWeights]:
    """As many copies of the model as there are steps, each a step further than the one before.

    With every version each copy takes its next step; at the end of the steps it takes them back,
    one by one. No two patches are equal within twice as many versions as there are steps.
    """
    states = [steps[0].old, *(step.new for step in steps)]
    turn = [*range(len(states)), *range(len(states) - 2, 0, -1)]
    version = 0
    while True:
        chosen = [states[turn[(copy + version) % len(turn)]] for copy in range(len(steps))]
        yield side_by_side("", [Step(name="", old=state, new=state) for state in chosen]).new
        version += 1


def _simulated(start: HostWeights) -> Iterator[HostWeights]:
    yield start
    yield from training(start, NUM_SIMULATED)
