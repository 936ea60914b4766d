"""snapshot="device": the same versions, of which only what changed is copied to the host.

Tensors on the CPU take the same way as those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from publish_helpers import DEADLINE_S, Gate, failing_after, read_version, view_of, write_base

from stitch.board import Board
from stitch.errors import StoreError, StoreFullError, UsageError
from stitch.publish import Publisher, shadow
from stitch.publish.shadow import Shadow
from stitch.tensors import HostWeights, open_checkpoint
from stitch.tensors.torch_state import select
from stitch.testing.faults import FaultyStore
from stitch.testing.published import IMPATIENT, NO_RETRIES, digest_of, quick_board
from stitch.types import Schema, TensorSpec, VersionRef


class Model(torch.nn.Module):
    """FP32 and BF16 tensors, odd sizes, a strided one, an integer, nothing and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(96, 101))
        self.strided = torch.nn.Parameter(torch.randn(50, 60).t())
        self.short = torch.nn.Parameter(torch.randn(5001).to(torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(7))
        self.register_buffer("codes", torch.randint(0, 255, (3003,), dtype=torch.uint8))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))

    def train_step(self, step: int, density: float = 0.002) -> None:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                mask = torch.rand(tensor.shape, generator=generator) < density
                tensor[mask] = tensor[mask] * 2 + 1
                if name == "count":
                    tensor += 1


@dataclass
class Copies:
    """What crossed from the tensors' device to the host."""

    num_whole: int = 0
    num_changes: int = 0
    dense: list[int] = field(default_factory=list)

    def take(self) -> Copies:
        taken = Copies(self.num_whole, self.num_changes, self.dense)
        self.num_whole, self.num_changes, self.dense = 0, 0, []
        return taken


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Counts copies; small models are cut into chunks and keep changes as if they were large."""
    counted = Copies()
    real_bits, real_update = shadow.host_bits, shadow._update

    def whole(words: Any) -> torch.Tensor:
        counted.num_whole += 1
        return real_bits(words)

    def update(*args: Any) -> Any:
        change = real_update(*args)
        if change is not None:
            counted.num_changes += 1
            if change.positions is None:
                counted.dense.append(change.words.size)
        return change

    monkeypatch.setattr(shadow, "host_bits", whole)
    monkeypatch.setattr(shadow, "_update", update)
    monkeypatch.setattr(shadow, "_CHUNK_BYTES", 2048)
    return counted


class World:
    """A model, a board behind a faulty store, and a publisher that takes snapshots this way."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.model = Model()
        directory.mkdir(exist_ok=True)
        self.base = write_base(directory / "base.safetensors", self.model)
        self.clean = quick_board(directory / "board")
        self.store = FaultyStore(self.clean.store)
        self.steps = 0
        self.options = {"threads": 1, "retry": NO_RETRIES, "snapshot": "device"} | options
        board = Board(self.store, patience=IMPATIENT)
        self.publisher = Publisher.start(board, "r", self.base, **self.options)

    @property
    def schema(self) -> Schema:
        return self.publisher.run.schema

    def train(self) -> None:
        self.steps += 1
        self.model.train_step(self.steps)

    def publish(self, source: Any = None) -> VersionRef:
        self.train()
        ticket = self.publisher.publish(self.model if source is None else source)
        return ticket.wait(DEADLINE_S)

    def assert_newest_is_the_model(self) -> None:
        run = self.clean.open_run("r")
        wanted = digest_of(view_of(self.model, run.schema))
        assert run.manifest(run.newest()).digest_after == wanted
        assert read_version(run, self.base).digest == wanted


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.publisher.close()


@pytest.mark.usefixtures("copies")
def test_versions_and_patches_are_those_of_whole_snapshots(tmp_path: Path) -> None:
    worlds = [World(tmp_path / mode, snapshot=mode) for mode in ("host", "device")]
    for world in worlds:
        for _ in range(6):
            world.publish()
            world.assert_newest_is_the_model()
        world.publisher.close()
    for version in range(1, 7):
        manifests = [world.clean.open_run("r").manifest(version) for world in worlds]
        blobs = [[blob.blake3 for blob in manifest.blobs] for manifest in manifests]
        assert blobs[0] == blobs[1]
        assert manifests[0].stats == manifests[1].stats


def test_from_the_third_snapshot_on_only_what_changed_is_copied(
    world: World, copies: Copies
) -> None:
    for _ in range(2):
        world.publish()
        assert copies.take().num_whole > 20
    for _ in range(4):
        world.publish()
        taken = copies.take()
        assert taken.num_whole == 0
        assert taken.num_changes > 10
        assert taken.dense == [1]  # the counter, a chunk of its own
    world.assert_newest_is_the_model()


def test_unchanged_tensors_cost_no_copy(world: World, copies: Copies) -> None:
    for _ in range(3):
        world.publish()
    copies.take()
    for _ in range(2):
        world.publisher.publish(world.model).wait(DEADLINE_S)
    assert (copies.num_whole, copies.num_changes) == (0, 0)
    world.assert_newest_is_the_model()


def test_a_step_that_changes_much_is_copied_whole_and_the_next_ones_go_on(
    world: World, copies: Copies
) -> None:
    for _ in range(3):
        world.publish()
    copies.take()
    world.model.train_step(1000, density=0.7)
    world.publish()
    assert sum(copies.take().dense) == world.schema.num_elements
    world.publish()  # into a buffer that lacks more than is kept
    assert copies.take().num_whole > 20
    world.publish()
    assert copies.take().num_whole == 0
    world.assert_newest_is_the_model()


@pytest.mark.parametrize("when_busy", ["coalesce", "block"])
@pytest.mark.usefixtures("copies")
def test_snapshots_that_overlap_or_are_replaced_lose_nothing(
    tmp_path: Path, when_busy: str
) -> None:
    world = World(tmp_path, when_busy=when_busy)
    gate = Gate(world.publisher._pipeline)
    for turn in range(4):
        tickets = []
        for _ in range(1 if when_busy == "block" else 2 + turn):
            world.train()
            tickets.append(world.publisher.publish(world.model))
            if len(tickets) == 1:
                gate.wait_entered()
        gate.let_pass(2)
        assert tickets[-1].wait(DEADLINE_S).version >= turn + 1
        world.publisher.flush(DEADLINE_S)
        world.assert_newest_is_the_model()
    world.publisher.close()


@pytest.mark.parametrize("place", [".patch", "2/manifest.json"])
def test_a_failed_publish_is_made_up_for_by_the_next(world: World, place: str) -> None:
    world.publish()
    world.store.fill_up(place, times=1)
    with pytest.raises(StoreFullError):
        world.publish()
    for version in (2, 3, 4):
        assert world.publish() == VersionRef("r", version)
        world.assert_newest_is_the_model()


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_commit_found_late_moves_the_baseline_under_the_snapshots(
    world: World, before: int
) -> None:
    for _ in range(before):
        world.publish()
    world.store.lose_reply(f"{before + 1}/manifest.json", times=1)
    world.store.fail(f"{before + 1}/manifest.json", times=None)
    with pytest.raises(StoreError, match="is not known"):
        world.publish()
    world.store.heal()
    for version in range(before + 2, before + 6):
        assert world.publish() == VersionRef("r", version)
        world.assert_newest_is_the_model()


def test_a_resumed_publisher_goes_on(world: World) -> None:
    for _ in range(3):
        world.publish()
    world.publisher.close()
    world.publisher = Publisher.resume(world.clean, "r", world.base, **world.options)
    for version in (4, 5, 6, 7):
        assert world.publish() == VersionRef("r", version)
        world.assert_newest_is_the_model()


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.usefixtures("copies")
def test_a_source_that_breaks_midway_spoils_nothing(world: World, count: int) -> None:
    for _ in range(3):
        world.publish()
        world.train()
        with pytest.raises(RuntimeError, match="the source broke"):
            world.publisher.publish(failing_after(world.model.state_dict(), count))
    for _ in range(3):
        world.publish(iter(world.model.state_dict().items()))
        world.assert_newest_is_the_model()


def test_running_out_of_device_memory_fails_one_publish(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    for _ in range(3):
        world.publish()
    with monkeypatch.context() as patch:
        patch.setattr(shadow, "_update", failing)
        with pytest.raises(torch.OutOfMemoryError):
            world.publish()
    assert not world.publisher._shadow._words  # type: ignore[union-attr]
    assert world.publish() == VersionRef("r", 4)
    world.assert_newest_is_the_model()


def test_readers_and_numpy_arrays_may_come_between(tmp_path: Path, world: World) -> None:
    def as_numpy() -> dict[str, Any]:
        state = world.model.state_dict()
        return state | {n: state[n].numpy() for n in ("embed", "codes", "none")}

    for turn in range(8):
        if turn % 4 == 3:
            world.train()
            file = write_base(tmp_path / f"{turn}.safetensors", world.model)
            with open_checkpoint(file) as reader:
                world.publisher.publish(reader).wait(DEADLINE_S)
        else:
            world.publish(as_numpy() if turn in (1, 4, 5) else None)
        world.assert_newest_is_the_model()


def test_a_trainer_in_inference_mode_may_publish(world: World) -> None:
    for turn in range(5):
        with torch.inference_mode(turn % 2 == 0):
            world.publish()
        world.assert_newest_is_the_model()


def test_closing_gives_the_device_memory_back(world: World) -> None:
    world.publish()
    assert world.publisher._shadow is not None
    assert world.publisher._shadow._words
    world.publisher.close()
    assert not world.publisher._shadow._words


def test_the_default_keeps_nothing_on_the_device(tmp_path: Path) -> None:
    world = World(tmp_path, snapshot="host")
    assert world.publisher._shadow is None
    world.publisher.close()
    with pytest.raises(UsageError, match="snapshot must be 'host' or 'device'"):
        Publisher.resume(world.clean, "r", snapshot="gpu")


SCHEMA = Schema.of(
    [
        TensorSpec.of("a", "BF16", (700,)),
        TensorSpec.of("b", "F64", (33,)),
        TensorSpec.of("c", "U8", (1003,)),
        TensorSpec.of("d", "F32", (5, 41)),
        TensorSpec.of("e", "BOOL", (3,)),
    ]
)


def test_a_tensor_that_was_an_array_meanwhile_is_copied_whole() -> None:
    schema = Schema.of([TensorSpec.of("t", "U8", (800,))])
    buffer, tracked = HostWeights.allocate(schema), Shadow(schema)
    tensor = torch.zeros(800, dtype=torch.uint8)
    array = np.zeros(800, np.uint8)
    array[7] = 1
    for source in (tensor, array, tensor):
        tracked.fill(buffer, [(schema["t"], source)])
        assert buffer.read("t", 0, 800).tolist() == source.tolist()


def mutate(state: dict[str, torch.Tensor], rng: np.random.Generator) -> None:
    density = rng.choice([0.0, 0.001, 0.02, 0.5, 1.0], p=[0.2, 0.3, 0.3, 0.1, 0.1])
    for tensor in state.values():
        bits = tensor.view(torch.uint8).view(-1)
        mask = rng.random(bits.numel()) < density
        if tensor.dtype == torch.bool:
            bits.bitwise_xor_(torch.from_numpy(mask).to(torch.uint8))
        else:
            noise = rng.integers(0, 256, bits.numel(), np.uint8)
            bits.bitwise_xor_(torch.from_numpy(noise * mask))


def spoil_nothing(buffer: HostWeights) -> None:
    pass


def write_elsewhere(buffer: HostWeights) -> None:
    buffer.words("c")[:5] ^= 255


def fill_elsewhere(buffer: HostWeights) -> None:
    buffer.fill(HostWeights.allocate(SCHEMA))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [0, 60, 10**9])
def test_any_history_of_buffers_gives_exact_snapshots(
    seed: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers in any order, some written to by others, some fills broken off."""
    monkeypatch.setattr(shadow, "_CHUNK_BYTES", 256)
    rng = np.random.default_rng(seed)
    state = {
        "a": torch.randn(700),  # rounded
        "b": torch.randn(33, dtype=torch.float64),
        "c": torch.zeros(1003, dtype=torch.uint8),
        "d": torch.randn(41, 5),
        "e": torch.zeros(3, dtype=torch.bool),
    }
    served = state | {"d": state["d"].t()}
    tracked = Shadow(SCHEMA)
    tracked._max_bytes = budget
    buffers = [HostWeights.allocate(SCHEMA) for _ in range(4)]
    others: list[Callable[[HostWeights], None]] = [spoil_nothing, write_elsewhere, fill_elsewhere]
    past = [{name: tensor.clone() for name, tensor in state.items()}]
    for _ in range(40):
        if rng.random() < 0.2:
            for name, tensor in past[rng.integers(0, len(past))].items():
                state[name].copy_(tensor)
        mutate(state, rng)
        past.append({name: tensor.clone() for name, tensor in state.items()})
        buffer = buffers[rng.integers(0, 4) if rng.random() < 0.5 else 0]
        others[rng.choice(3, p=[0.8, 0.1, 0.1])](buffer)
        if rng.random() < 0.1:
            broken = ((SCHEMA[name], t) for name, t in failing_after(served, 3))
            with pytest.raises(RuntimeError, match="the source broke"):
                tracked.fill(buffer, broken)
            continue
        source = dict(served)
        if rng.random() < 0.2:
            source["c"] = state["c"].numpy().copy()  # type: ignore[assignment]
        tracked.fill(buffer, select(SCHEMA, source))
        wanted = view_of(served, SCHEMA)
        for index in range(len(SCHEMA)):
            np.testing.assert_array_equal(
                buffer.read(SCHEMA.tensors[index].name, 0, SCHEMA.tensors[index].num_words),
                wanted.words_at(index),
            )
        kept = sum(taken.num_bytes for taken in list(tracked._taken)[1:])
        assert kept <= budget
        assert len(tracked._taken) <= 4
