"""What the publisher's tests share: a model with its base, readers, and a publisher that waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stitch.board import Run
from stitch.mirror import Mirror
from stitch.publish.pipeline import Pipeline
from stitch.publish.queue import Published
from stitch.tensors import HostWeights, open_checkpoint, write_safetensors
from stitch.tensors.torch_state import copy_words, spec_of
from stitch.types import Schema
from stitch.views import ViewReader

DEADLINE_S = 60.0


class TinyModel(torch.nn.Module):
    """A tied head, a norm kept in FP32, a buffer, an empty and a 0-dimensional tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(96, 16, dtype=dtype)
        self.layer = torch.nn.Linear(16, 24, dtype=dtype)
        self.head = torch.nn.Linear(16, 96, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 4, dtype=dtype))
        self.register_buffer("scratch", torch.ones(5), persistent=False)

    def train_step(self, step: int) -> None:
        """A change of about every tenth element, the buffer included."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for tensor in self.parameters():
                mask = torch.rand(tensor.shape, generator=generator) < 0.1
                tensor[mask] *= 1.05
            self.count += 1


def write_base(path: Path, model: torch.nn.Module) -> Path:
    """The model's tensors in their own dtypes, the second name of the tie left out."""
    tensors = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    schema = Schema.of(spec_of(name, tensor) for name, tensor in tensors.items())
    weights = HostWeights.allocate(schema)
    for spec in schema.tensors:
        copy_words(spec, tensors[spec.name], weights.words(spec.name))
    write_safetensors(path, weights)
    return path


def read_version(run: Run, base: Path, version: int | None = None) -> Mirror:
    """What a reader that starts from the base gets."""
    with open_checkpoint(base) as checkpoint:
        mirror = Mirror.load(ViewReader(checkpoint, run.record.view))
    mirror.identify(run)
    mirror.advance(run, version)
    return mirror


def view_of(model: torch.nn.Module | dict[str, Any], schema: Schema) -> HostWeights:
    """The model's weights in the view, computed apart from the publisher."""
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    weights = HostWeights.allocate(schema)
    for spec in schema.tensors:
        tensor = state[spec.name]
        wanted = torch.bfloat16 if spec.dtype == "BF16" else tensor.dtype
        copy_words(spec, tensor.to(wanted), weights.words(spec.name))
    return weights


class Gate:
    """Holds the publisher's worker before it encodes, until opened."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)
        self._real = pipeline.publish
        self.steps: list[int | None] = []
        pipeline.publish = self._publish  # type: ignore[method-assign]

    def _publish(self, snapshot: HostWeights, step: int | None) -> Published:
        self.steps.append(step)
        self.entered.release()
        assert self._open.acquire(timeout=DEADLINE_S)
        return self._real(snapshot, step)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_S)

    def let_pass(self, count: int = 1) -> None:
        self._open.release(count)


def failing_after(pairs: dict[str, Any], count: int) -> Iterator[tuple[str, Any]]:
    """A source that breaks at its tensor number `count`."""
    for number, pair in enumerate(pairs.items()):
        if number == count:
            raise RuntimeError("the source broke")
        yield pair
