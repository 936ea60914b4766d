"""A run of real optimizer steps: every version arrives bit for bit, in small patches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from stitch.mirror import Mirror
from stitch.publish import Publisher
from stitch.tensors import HostWeights, open_checkpoint, write_safetensors
from stitch.testing.published import copy_of, digest_of, quick_board
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights
from stitch.types import VersionRef

Step = Callable[[HostWeights, int], None]


def run_steps(directory: Path, base: Path, take_step: Step, num_steps: int) -> list[float]:
    """Publish step by step, follow with a mirror; bytes per changed element of each version."""
    with open_checkpoint(base) as checkpoint:
        trainer = HostWeights.load(checkpoint)
        replica = Mirror.load(checkpoint)
    start = copy_of(trainer)
    costs = []
    with Publisher.start(quick_board(directory / "board"), "r", base) as publisher:
        replica.identify(publisher.run)
        before = replica.digests
        updates = []
        for step in range(1, num_steps + 1):
            take_step(trainer, step)
            ticket = publisher.publish(trainer, step=step)
            assert ticket.wait(60) == VersionRef("r", step)
            updates.append(replica.advance(publisher.run))
            assert digest_of(replica.weights) == digest_of(trainer) == publisher.digest
            assert ticket.stats is not None
            costs.append(ticket.stats.num_bytes / ticket.stats.num_changed)
        late = Mirror.load(start)
        late.identify(publisher.run)
        whole = late.advance(publisher.run)
    assert late.digest == replica.digest
    late.undo(whole, VersionRef("r", 0), before)
    assert digest_of(late.weights) == digest_of(start)
    return costs


def test_generated_steps_arrive_bit_for_bit(tmp_path: Path) -> None:
    weights = synthetic_weights(synthetic_schema(hidden=128))
    write_safetensors(tmp_path / "base.safetensors", weights)

    def take_step(trainer: HostWeights, step: int) -> None:
        adam_step(trainer, 0.007, seed=step)

    costs = run_steps(tmp_path, tmp_path / "base.safetensors", take_step, 4)
    assert max(costs) < 3


def test_real_steps_arrive_bit_for_bit(tmp_path: Path, real_data: Path) -> None:
    def take_step(trainer: HostWeights, step: int) -> None:
        with np.load(real_data / "adam1e6" / f"step{step:03}.npz") as changes:
            for name in trainer.schema.index:
                if f"{name}|index" in changes:
                    trainer.words(name)[changes[f"{name}|index"]] = changes[f"{name}|bits"]

    costs = run_steps(tmp_path, real_data / "base.safetensors", take_step, 8)
    assert max(costs) <= 1.95
