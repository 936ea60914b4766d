"""Running a loader with its writes caught, and what is found out about loaders that do more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from placement_kit import (
    HIDDEN,
    Layout,
    Pairs,
    Ranks,
    ShardedModel,
    built,
    checkpoint,
    live_bits,
    pairs,
    random_update,
    same_bits,
)
from test_rank_weights import LAYOUTS

from stitch.engines.placement.live import LiveTensors, StandIns
from stitch.engines.placement.placement import Placement
from stitch.engines.placement.readback import read_back
from stitch.engines.placement.record import Recording, record
from stitch.engines.ranks.learning import learn
from stitch.errors import FatalReplicaError
from stitch.tensors import HostWeights
from stitch.types import Schema, TensorSpec
from stitch.views import ViewReader

PLAIN = {name: it for name, it in LAYOUTS.items() if not (it.repack or it.joined or it.wide_norms)}


def recorded(model: ShardedModel, weights: Any, load: Any = None) -> Recording:
    return record(model, LiveTensors(model), load or model.load_weights, weights.schema, weights)


@pytest.mark.parametrize("layout", PLAIN.values(), ids=PLAIN)
def test_blocks_are_where_numbers_end_that_are_loaded_for_real(layout: Layout) -> None:
    """An independent witness: int64 parameters, and element numbers instead of weights."""
    weights = checkpoint(layout)
    for rank in range(layout.world):
        model = built(layout, rank, pairs(weights))
        recording = recorded(model, weights)
        assert not recording.lost
        live = LiveTensors(model)
        firsts, total = {}, 1
        for spec in weights.schema.tensors:
            firsts[spec.name] = total
            total += spec.num_words
        numbers = (
            (
                spec.name,
                torch.arange(firsts[spec.name], firsts[spec.name] + spec.num_words).view(
                    spec.shape
                ),
            )
            for spec in weights.schema.tensors
        )
        held = [
            getattr(model, "w_kc", None),
            getattr(model, "helper", None) and model.helper.tables,
        ]
        if layout.latent:
            model.w_kc = None
        with StandIns(live, dtype=torch.int64, zero=True) as stand_ins, torch.no_grad():
            model.load_weights(numbers)
        if layout.latent:
            model.w_kc, model.helper.tables = held
        for key, flat in stand_ins.flats.items():
            claimed = torch.zeros_like(flat)
            for name, blocks in recording.blocks.items():
                for block in blocks:
                    if block.key == key:
                        claimed[block.offsets()] = (
                            torch.from_numpy(block.positions()) + firsts[name]
                        )
            assert torch.equal(claimed, flat), key


def test_nothing_of_the_model_changes() -> None:
    layout = Layout(world=2, latent="copied", experts=True, threads=True)
    weights = checkpoint(layout)
    model = built(layout, 1, pairs(weights))
    before, tables, copied = live_bits(model), dict(model.helper.tables), model.w_kc
    other = checkpoint(layout, seed=1)
    recording = recorded(model, other)
    assert same_bits(before, live_bits(model))
    assert model.w_kc is copied
    assert model.helper.tables["w_vc"] is tables["w_vc"]
    assert set(recording.derived) == {"w_kc", "helper.tables.w_vc"}
    assert not recording.lost


def test_copies_in_threads_that_a_loader_starts_are_caught() -> None:
    weights = checkpoint(Layout())
    model = built(Layout(), 0, pairs(weights))
    before = live_bits(model)

    def load(given: Pairs) -> None:
        for name, tensor in given:
            thread = threading.Thread(target=model._load, args=(name, tensor))
            thread.start()
            thread.join()

    recording = recorded(model, weights, load)
    assert same_bits(before, live_bits(model))
    assert recording.blocks == recorded(model, weights).blocks
    assert threading.Thread.start.__module__ == "threading"


def test_models_may_be_recorded_side_by_side_and_leave_in_any_order() -> None:
    """Whoever comes first leaves first: what it found must not come back with the other's end."""
    weights = checkpoint(Layout())
    alone = recorded(built(Layout(), 0, pairs(weights)), weights)
    untouched = ThreadPoolExecutor.submit, threading.Thread.start
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def load_first(model: ShardedModel, given: Pairs) -> None:
        first_is_in.set()
        assert second_is_in.wait(30)
        model.load_weights(given)

    def load_second(model: ShardedModel, given: Pairs) -> None:
        second_is_in.set()
        assert first_is_out.wait(30)
        with ThreadPoolExecutor(1) as pool:
            here = pool.submit(threading.get_ident).result()
        assert here == threading.get_ident()  # still taken along
        model.load_weights(given)

    def work(load: Callable[[ShardedModel, Pairs], None]) -> Recording:
        model = built(Layout(), 0, pairs(weights))
        return recorded(model, weights, lambda given: load(model, given))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work, load_first)
        assert first_is_in.wait(30)
        second = pool.submit(work, load_second)
        assert first.result(60).blocks == alone.blocks
        first_is_out.set()
        assert second.result(60).blocks == alone.blocks
    assert (ThreadPoolExecutor.submit, threading.Thread.start) == untouched


def test_memory_that_changes_all_the_same_is_noticed() -> None:
    weights = checkpoint(Layout())
    model = built(Layout(), 0, pairs(weights))
    alias = model.norm.data.view(torch.int16).numpy()

    def load(given: Pairs) -> None:
        alias[3] += 1

    with pytest.raises(FatalReplicaError, match="norm"):
        recorded(model, weights, load)


def test_a_loader_that_fails_leaves_the_model() -> None:
    weights = checkpoint(Layout())
    model = built(Layout(), 0, pairs(weights))
    before = live_bits(model)

    def load(given: Pairs) -> None:
        model._load(*next(iter(given)))
        model.norm = torch.nn.Parameter(torch.zeros(3))
        raise RuntimeError("no such name")

    with pytest.raises(RuntimeError, match="no such name"):
        recorded(model, weights, load)
    assert same_bits(before, live_bits(model))


def overwritten(model: ShardedModel) -> None:
    model.qkv.data[5:7].zero_()


def replaced(model: ShardedModel) -> None:
    model.norm = torch.nn.Parameter(model.norm.data * 1)


@pytest.mark.parametrize(
    ("after", "names"),
    [
        (overwritten, {"q_proj.weight"}),
        (replaced, {"norm.weight"}),
    ],
)
def test_what_a_loader_does_after_its_copies_counts(
    after: Callable[[ShardedModel], None], names: set[str]
) -> None:
    weights = checkpoint(Layout())
    model = built(Layout(), 0, pairs(weights))

    def load(given: Pairs) -> None:
        model.load_weights(given)
        after(model)

    assert set(recorded(model, weights, load).lost) == names


def test_values_that_are_changed_by_the_load_are_refused() -> None:
    layout = Layout(scale=True)
    weights = checkpoint(layout)
    ranks = Ranks(layout, weights)
    assert set(ranks.agreement.refused) == {"norm.weight"}
    assert (
        "live words are not" in ranks.agreement.refused["norm.weight"]
        or "more than a copy" in (ranks.agreement.refused["norm.weight"])
    )


def test_a_copy_that_is_computed_otherwise_is_refused() -> None:
    layout = Layout(latent="scaled", world=2)
    ranks = Ranks(layout, checkpoint(layout))
    assert set(ranks.agreement.refused) == {"kv_b_proj.weight"}
    assert "w_kc" in ranks.agreement.refused["kv_b_proj.weight"]


def test_repacked_weights_need_a_second_model() -> None:
    layout = Layout(experts=True, repack=True, world=2)
    weights = checkpoint(layout)
    refused = Ranks(layout, weights, build=False).agreement.refused
    assert set(refused) == {name for name in weights.schema.index if name.startswith("experts.")}
    assert all("rearranges" in reason for reason in refused.values())
    learned = Ranks(layout, weights).ranks[0].learn()
    assert max(len(blocks) for blocks in learned["names"].values()) == 1


def test_a_second_model_that_cannot_be_built_refuses_what_needs_it() -> None:
    layout = Layout(experts=True, repack=True)
    weights = checkpoint(layout)
    model = built(layout, 0, pairs(weights))

    def build(given: Pairs) -> torch.nn.Module:
        raise MemoryError("no room")

    learned = learn(model, weights.schema, model.load_weights, weights, build)
    assert len(learned.refused) == 12
    assert any("no room" in note for note in learned.notes)


def test_a_hidden_copy_is_found_with_a_second_model() -> None:
    """As a layout made once at start-up: the loader does not know of it."""
    layout = Layout()
    weights = checkpoint(layout)

    def build(given: Pairs) -> ShardedModel:
        model = built(layout, 0, given)
        model.packed = model.o.data.t().contiguous()
        model.scratch = torch.zeros(512, dtype=torch.bfloat16)
        model.noise = torch.linspace(1, 9, 400).to(torch.bfloat16)
        return model

    model = build(pairs(weights))
    learned = learn(model, weights.schema, model.load_weights, weights, build)
    assert not learned.refused
    assert {block.key for block in learned.placement["o_proj.weight"]} == {"o", "packed"}
    assert any("noise" in note for note in learned.notes)
    assert not any("scratch" in note for note in learned.notes)


def test_refused_names_are_not_staged_and_others_are() -> None:
    layout = Layout(experts=True, repack=True)
    weights = checkpoint(layout)
    ranks = Ranks(layout, weights, build=False)
    (answer,) = ranks.stage("a", random_update(weights, 0, names=["experts.1.up_proj.weight"]))
    assert (answer["ok"], answer["type"]) == (False, "EngineError")
    assert "cannot be changed in place" in answer["error"]
    assert all(a["ok"] for a in ranks.stage("b", random_update(weights, 0, names=["norm.weight"])))


def test_a_float32_checkpoint_is_placed_as_its_bf16_view() -> None:
    layout = Layout(world=2)
    stored = checkpoint(layout, dtype="F32")
    view = ViewReader(stored, "bf16")
    models = [built(layout, rank, pairs(stored)) for rank in range(2)]
    for model in models:
        learned = learn(model, view.schema, model.load_weights, view)
        assert not learned.refused
        assert set(learned.placement) == set(view.schema.index)
        raw = learn(model, stored.schema, model.load_weights, stored)
        assert set(raw.refused) == set(stored.schema.index)
        assert "does not hold" in raw.refused["norm.weight"]


def test_wrong_base_weights_are_found_by_reading_back() -> None:
    weights = checkpoint(Layout())
    model = built(Layout(), 0, pairs(weights))
    recording = recorded(model, weights)
    live, placement = LiveTensors(model), Placement(recording.blocks)
    assert read_back(placement, live, weights) == {}
    weights.words("k_proj.weight")[5] ^= 1
    weights.words("norm.weight")[:2] ^= 1
    assert read_back(placement, live, weights) == {"k_proj.weight": 1, "norm.weight": 2}


def test_a_tensor_that_goes_to_many_places_is_followed_to_all() -> None:
    class Repeated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.zeros(3, HIDDEN, dtype=torch.bfloat16))

        def load_weights(self, given: Pairs) -> None:
            for _, tensor in given:
                self.rows.data.copy_(tensor)

    weights = HostWeights.allocate(Schema.of([TensorSpec.of("row", "BF16", (HIDDEN,))]))
    weights.words("row")[:] = range(HIDDEN)
    model = Repeated()
    with torch.no_grad():
        model.load_weights(pairs(weights))
    learned = learn(model, weights.schema, model.load_weights, weights)
    assert len(learned.placement["row"]) == 3
    assert not learned.refused
