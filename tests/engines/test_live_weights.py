"""Changing a model in place: names, ties, checks, read-back, undo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.engines.embedded import engine as engine_module
from stitch.engines.embedded.model import load_model
from stitch.engines.embedded.weights import Change, LiveWeights, Patch
from stitch.errors import EngineError, SchemaMismatchError, UsageError
from stitch.tensors import HostWeights, open_checkpoint, write_checkpoint
from stitch.testing.engine_contract import dense_update, flip_update
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import Schema, TensorSpec
from stitch.views import ViewReader

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def held(directory: Path) -> HostWeights:
    with open_checkpoint(directory) as checkpoint:
        return HostWeights.load(checkpoint)


def digest(reader: object) -> str:
    return DigestState.of(reader).version_digest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_loaded_model_has_the_digest_of_its_checkpoint(tiny: Path, dtype: str) -> None:
    assert digest(load_model(tiny, dtype=dtype).weights) == digest(held(tiny))


def test_a_float32_checkpoint_is_served_as_its_bf16_view(tiny_f32: Path) -> None:
    with open_checkpoint(tiny_f32) as checkpoint:
        wanted = digest(ViewReader(checkpoint, "bf16"))
    for dtype in ("bfloat16", "float32"):
        assert digest(load_model(tiny_f32, dtype=dtype, view="bf16").weights) == wanted


def test_a_float32_view_cannot_be_computed_in_bfloat16(tiny_f32: Path) -> None:
    with pytest.raises(SchemaMismatchError, match="BF16"):
        load_model(tiny_f32, dtype="bfloat16", view="checkpoint")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_applied_words_are_what_the_model_computes_with(tiny: Path, dtype: str) -> None:
    loaded, weights = load_model(tiny, dtype=dtype), held(tiny)
    for make in (lambda it: flip_update(it, 1), dense_update):
        update = make(weights)
        loaded.weights.prepare(update).apply()
        update.apply(weights)
        assert digest(loaded.weights) == digest(weights)
    model = loaded.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    state = model.state_dict()
    for name in (EMBED, HEAD):
        live = state[name].to(torch.bfloat16).view(torch.int16).numpy().reshape(-1)
        assert (live.view("<u2") == weights.words(EMBED)).all()


def test_undo_gives_back_every_bit(tiny: Path) -> None:
    loaded, weights = load_model(tiny, dtype="bfloat16"), held(tiny)
    change = loaded.weights.prepare(flip_update(weights, 1, per_tensor=50))
    change.apply()
    assert digest(loaded.weights) != digest(weights)
    change.undo()
    assert digest(loaded.weights) == digest(weights)


def test_values_beyond_bf16_in_float32_storage_are_found(tiny: Path) -> None:
    loaded = load_model(tiny, dtype="float32")
    with torch.no_grad():
        loaded.model.model.norm.weight[3] += 1e-6
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        digest(loaded.weights)


@pytest.fixture
def both_names(tmp_path: Path, tiny: Path) -> Path:
    """A checkpoint that ships the tied tensor under both of its names."""
    source = held(tiny)
    specs = [*source.schema.tensors]
    specs.append(TensorSpec.of(HEAD, "BF16", source.schema[EMBED].shape))
    weights = HostWeights.allocate(Schema.of(specs))
    for spec in weights.schema.tensors:
        weights.words(spec.name)[:] = source.words(EMBED if spec.name == HEAD else spec.name)
    write_checkpoint(tmp_path / "both", weights, assets_from=tiny)
    return tmp_path / "both"


def both_changed(weights: HostWeights, head_bit: int) -> UpdateSet:
    updates = []
    for name, bit in ((HEAD, head_bit), (EMBED, 1)):
        old = weights.words(name)[:4].copy()
        updates.append(
            TensorUpdate(
                tensor=weights.schema.index[name],
                positions=np.arange(4, dtype=np.int64),
                new=old ^ np.uint16(bit),
                old=old,
            )
        )
    return UpdateSet(updates)


def test_a_tied_tensor_under_both_names_is_changed_under_both(both_names: Path) -> None:
    loaded, weights = load_model(both_names, dtype="bfloat16"), held(both_names)
    assert digest(loaded.weights) == digest(weights)
    update = both_changed(weights, head_bit=1)
    loaded.weights.prepare(update).apply()
    update.apply(weights)
    assert digest(loaded.weights) == digest(weights)


def test_a_stage_that_would_make_tied_names_differ_is_refused(both_names: Path) -> None:
    loaded, weights = load_model(both_names, dtype="bfloat16"), held(both_names)
    with pytest.raises(EngineError, match=r"tied.*lm_head.*embed_tokens"):
        loaded.weights.prepare(both_changed(weights, head_bit=2))
    only_head = UpdateSet(both_changed(weights, head_bit=1).updates[:1])
    with pytest.raises(EngineError, match="tied"):
        loaded.weights.prepare(only_head)


def test_names_that_the_model_does_not_have_are_listed(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 4, bias=False)}).to(torch.bfloat16)
    schema = Schema.of(
        TensorSpec.of(f"experts.{at}.gate.weight", "BF16", (4, 4)) for at in range(2)
    )
    with pytest.raises(SchemaMismatchError, match=r"unknown: gate\.weight.*experts\.0"):
        LiveWeights.of(model, schema)


def test_a_packed_tensor_of_as_many_elements_is_not_taken_for_another() -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2, 8))}).bfloat16()
    schema = Schema.of([TensorSpec.of("w", "BF16", (4, 4))])
    with pytest.raises(SchemaMismatchError, match="another shape"):
        LiveWeights.of(model, schema)


def test_positions_that_do_not_ascend_are_refused(tiny: Path) -> None:
    loaded, weights = load_model(tiny, dtype="bfloat16"), held(tiny)
    old = weights.words(EMBED)[[5, 3]]
    update = TensorUpdate(
        tensor=weights.schema.index[EMBED],
        positions=np.array([5, 3]),
        new=old ^ np.uint16(1),
        old=old,
    )
    with pytest.raises(EngineError, match="ascend"):
        loaded.weights.prepare(UpdateSet([update]))


class Torn(Patch):
    """A patch whose writing fails a given number of times."""

    failures: int

    def write(self, values: torch.Tensor) -> None:
        super().write(values)
        if self.__dict__.get("failures", 0):
            self.__dict__["failures"] -= 1
            raise RuntimeError("on purpose")


def torn(change: Change, failures: int) -> Change:
    """The same change, failing in its last tensor."""
    last = change.patches[-1]
    patch = Torn(last.name, last.live, last.where, last.new, last.old)
    patch.__dict__["failures"] = failures
    return Change((*change.patches[:-1], patch), change.num_changed)


def test_a_commit_that_fails_in_its_last_tensor_leaves_the_old_bits(tiny: Path) -> None:
    loaded, weights = load_model(tiny, dtype="bfloat16"), held(tiny)
    change = torn(loaded.weights.prepare(flip_update(weights, 1)), failures=1)
    with pytest.raises(EngineError, match="undone"):
        engine_module._transact(change.apply, change.undo, "commit")
    assert digest(loaded.weights) == digest(weights)


def test_when_the_undo_fails_too_the_process_ends(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, weights = load_model(tiny, dtype="bfloat16"), held(tiny)
    change = torn(loaded.weights.prepare(flip_update(weights, 1)), failures=2)

    def exit_loudly(reason: str) -> None:
        raise SystemExit(reason)

    monkeypatch.setattr(engine_module, "exit_loudly", exit_loudly)
    with pytest.raises(SystemExit, match=r"failed.*undo failed"):
        engine_module._transact(change.apply, change.undo, "commit")


def test_words_that_do_not_take_are_noticed_by_reading_back(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, weights = load_model(tiny, dtype="bfloat16"), held(tiny)
    change = loaded.weights.prepare(flip_update(weights, 1))
    monkeypatch.setattr(Patch, "write", lambda self, values: None)
    with pytest.raises(EngineError, match="read back"):
        change.apply()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"sliding_window": 16}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attn_logit_softcapping": 30.0}, "softcap"),
        ({"is_encoder_decoder": True}, "decoder"),
        ({"is_causal": False}, "decoder"),
    ],
)
def test_models_with_other_attention_are_refused(
    tmp_path: Path, setting: dict[str, object], problem: str
) -> None:
    directory = tiny_checkpoint(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(UsageError, match=problem):
        load_model(directory)
