"""Publishing: what arrives on the board is what the trainer had, or nothing new arrives."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from publish_helpers import TinyModel, failing_after, read_version, view_of, write_base

from stitch.board import Board
from stitch.errors import (
    PublisherClosedError,
    RunExistsError,
    SchemaMismatchError,
    UsageError,
)
from stitch.publish import Publisher
from stitch.tensors import open_checkpoint, write_checkpoint
from stitch.testing.published import NO_RETRIES, digest_of, quick_board
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import VersionRef


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def base(tmp_path: Path, model: TinyModel) -> Path:
    return write_base(tmp_path / "base.safetensors", model)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return quick_board(tmp_path / "board")


def start(board: Board, base: Path, **options: object) -> Publisher:
    return Publisher.start(board, "r", base, retry=NO_RETRIES, threads=1, **options)


def test_every_published_version_is_bit_for_bit_the_trainers(
    board: Board, base: Path, model: TinyModel
) -> None:
    wanted = []
    with start(board, base) as publisher:
        schema = publisher.run.schema
        for step in range(1, 4):
            model.train_step(step)
            wanted.append(digest_of(view_of(model, schema)))
            ticket = publisher.publish(model, step=step)
            assert ticket.wait(60) == VersionRef("r", step)
            assert ticket.done
            assert not ticket.coalesced
            assert ticket.stats is not None
            assert 0 < ticket.stats.num_changed < schema.num_elements
            assert publisher.ref == VersionRef("r", step)
            assert publisher.digest == wanted[-1]
    run = board.open_run("r")
    assert run.newest() == 3
    assert [run.manifest(v).step for v in (1, 2, 3)] == [1, 2, 3]
    for version in (1, 2, 3):
        assert read_version(run, base, version).digest == wanted[version - 1]


@pytest.mark.parametrize(
    ("options", "encodings"),
    [({"decode": "changed"}, {"gaps"}), ({"encoding": "dense"}, {"dense"}), ({}, {"dense"})],
)
def test_encodings_are_those_that_were_asked_for(
    board: Board, base: Path, model: TinyModel, options: dict[str, str], encodings: set[str]
) -> None:
    with start(board, base, **options) as publisher:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor *= 1.5
        model.train_step(1)  # the buffer, too
        publisher.publish(model).wait(60)
    run = board.open_run("r")
    found = run.manifest(1).stats.encodings
    assert encodings <= set(found)
    assert "decode" not in options or set(found) == encodings
    assert read_version(run, base).digest == run.manifest(1).digest_after


def test_several_optimizer_steps_between_publishes_all_arrive(
    board: Board, base: Path, model: TinyModel
) -> None:
    with start(board, base) as publisher:
        with torch.no_grad():
            model.layer.bias[0] += 1.0  # changed by the first step alone
        for step in range(1, 5):
            with torch.no_grad():
                model.embed.weight[step] *= 1.5
        publisher.publish(model).wait(60)
        wanted = digest_of(view_of(model, publisher.run.schema))
    assert read_version(board.open_run("r"), base).digest == wanted


def test_special_bit_patterns_arrive_untouched(tmp_path: Path, board: Board) -> None:
    bits = np.array(
        [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC0, 0x7F81, 0x0001],
        np.uint16,
    )
    before = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    after = {"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}
    base = write_base(tmp_path / "special.safetensors", torch.nn.ParameterDict(before))
    with start(board, base) as publisher:
        publisher.publish(after).wait(60)
    mirror = read_version(board.open_run("r"), base)
    assert mirror.weights.words("w").tolist() == bits.tolist()


def test_an_unchanged_model_still_makes_a_real_version(
    board: Board, base: Path, model: TinyModel
) -> None:
    with start(board, base) as publisher:
        ticket = publisher.publish(model)
        assert ticket.wait(60) == VersionRef("r", 1)
        assert ticket.stats is not None
        assert ticket.stats.num_changed == 0
    run = board.open_run("r")
    assert run.manifest(1).digest_after == run.record.base_digest
    assert read_version(run, base).ref == VersionRef("r", 1)


def test_all_kinds_of_sources_give_identical_blobs(tmp_path: Path, model: TinyModel) -> None:
    base = write_base(tmp_path / "base.safetensors", model)
    model.train_step(1)
    state = model.state_dict()
    untied = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    trained = write_base(tmp_path / "trained.safetensors", model)

    class Wrapper(torch.nn.Module):
        """As DistributedDataParallel does."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.module = inner

    with open_checkpoint(trained) as checkpoint:
        sources = {
            "module": model,
            "wrapped": Wrapper(model),
            "state-dict": state,
            "untied": untied,
            "compiled": {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
            "nested": {f"module._orig_mod.{name}": tensor for name, tensor in untied.items()},
            "pairs": list(untied.items()),
            "reversed": reversed(untied.items()),
            "iterator": iter(untied.items()),
            "generator": ((name, tensor.clone()) for name, tensor in untied.items()),
            "rounded": {n: t.bfloat16() if t.is_floating_point() else t for n, t in untied.items()},
            "strided": {n: t.t().clone().t() if t.dim() == 2 else t for n, t in untied.items()},
            "numpy": {name: tensor.numpy() for name, tensor in untied.items()},
            "checkpoint": checkpoint,
        }
        blobs = {}
        for name, source in sources.items():
            board = quick_board(tmp_path / name)
            with start(board, base) as publisher:
                publisher.publish(source).wait(60)
            manifest = board.open_run("r").manifest(1)
            blobs[name] = ([blob.blake3 for blob in manifest.blobs], manifest.digest_after)
    assert all(found == blobs["module"] for found in blobs.values()), blobs


def test_more_threads_give_the_same_blobs(tmp_path: Path, model: TinyModel) -> None:
    base = write_base(tmp_path / "base.safetensors", model)
    model.train_step(1)
    hashes = set()
    for threads in (1, 2, None):
        board = quick_board(tmp_path / f"board-{threads}")
        with Publisher.start(board, "r", base, threads=threads) as publisher:
            publisher.publish(model).wait(60)
        hashes.add(tuple(blob.blake3 for blob in board.open_run("r").manifest(1).blobs))
    assert len(hashes) == 1


def test_the_trainers_tensors_are_never_written_to(
    board: Board, base: Path, model: TinyModel
) -> None:
    model.train_step(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with start(board, base) as publisher:
        ticket = publisher.publish(model)
        ticket.wait(60)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_the_trainer_does_after_publish_is_not_in_the_version(
    board: Board, base: Path, model: TinyModel
) -> None:
    with start(board, base) as publisher:
        model.train_step(1)
        wanted = digest_of(view_of(model, publisher.run.schema))
        ticket = publisher.publish(model)
        model.train_step(2)
        ticket.wait(60)
    assert read_version(board.open_run("r"), base).digest == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"layer.weigth": s["layer.weight"].clone()}, r"unknown: layer\.weigth"),
        (lambda s: {n: t for n, t in s.items() if n != "layer.bias"}, r"missing: layer\.bias"),
        (lambda s: s | {"layer.bias": s["layer.bias"].reshape(2, 12)}, r"layer\.bias: got"),
        (lambda s: s | {"count": s["count"].to(torch.int32)}, r"count: got I32"),
        (lambda s: s | {"count": s["count"].reshape(1)}, r"count: got I64\[1\]"),
    ],
)
@pytest.mark.parametrize("form", ["mapping", "iterator"])
def test_tensors_that_do_not_fit_are_refused_by_name_and_nothing_is_lost(
    board: Board, base: Path, model: TinyModel, change: object, message: str, form: str
) -> None:
    good = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    bad = change(good)  # type: ignore[operator]
    with start(board, base) as publisher:
        with pytest.raises(SchemaMismatchError, match=message):
            publisher.publish(bad if form == "mapping" else iter(bad.items()))
        assert publisher.publish(model).wait(60) == VersionRef("r", 1)


@pytest.mark.parametrize("count", range(5))
def test_a_source_that_breaks_at_any_tensor_changes_nothing(
    board: Board, base: Path, model: TinyModel, count: int
) -> None:
    with start(board, base) as publisher:
        model.train_step(1)
        first = digest_of(view_of(model, publisher.run.schema))
        publisher.publish(model).wait(60)
        model.train_step(2)
        state = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
        with pytest.raises(RuntimeError, match="the source broke"):
            publisher.publish(failing_after(state, count))
        assert publisher.ref == VersionRef("r", 1)
        assert read_version(publisher.run, base).digest == first
        assert publisher.publish(model).wait(60) == VersionRef("r", 2)
        wanted = digest_of(view_of(model, publisher.run.schema))
    assert read_version(board.open_run("r"), base).digest == wanted


def test_a_checkpoint_that_is_not_the_runs_is_refused(
    tmp_path: Path, board: Board, base: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "other")
    publisher = start(board, base)
    with open_checkpoint(other) as checkpoint, pytest.raises(SchemaMismatchError, match="unknown"):
        publisher.publish(checkpoint)
    publisher.close()


@pytest.mark.parametrize("step", [True, 1.5, "7"])
def test_a_step_that_is_no_integer_is_refused(
    board: Board, base: Path, model: TinyModel, step: object
) -> None:
    with start(board, base) as publisher, pytest.raises(UsageError, match="step must be"):
        publisher.publish(model, step=step)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1, 10**5000], ids=["high", "low", "huge"])
def test_a_step_that_no_manifest_can_hold_is_refused_at_once(
    board: Board, base: Path, model: TinyModel, step: int
) -> None:
    with start(board, base) as publisher, pytest.raises(UsageError, match="fit into 64 bits"):
        publisher.publish(model, step=step)


def test_numpy_integers_are_steps(board: Board, base: Path, model: TinyModel) -> None:
    with start(board, base) as publisher:
        publisher.publish(model, step=np.int64(7)).wait(60)  # type: ignore[arg-type]
    assert board.open_run("r").manifest(1).step == 7


def test_the_checkpoint_view_keeps_the_bases_dtypes(board: Board, base: Path) -> None:
    model = TinyModel()
    with start(board, base, view="checkpoint") as publisher:
        model.train_step(1)
        publisher.publish(model).wait(60)
    run = board.open_run("r")
    assert {spec.dtype for spec in run.schema.tensors} == {"F32", "I64"}
    mirror = read_version(run, base)
    words = mirror.weights.words("layer.bias").view(np.float32)
    assert words.tolist() == model.layer.bias.tolist()


def test_a_directory_base_brings_its_small_files_along(tmp_path: Path, board: Board) -> None:
    base = tiny_checkpoint(tmp_path / "tiny")
    with start(board, base) as publisher:
        record = publisher.run.record
    names = {asset.name for asset in record.assets}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    (config,) = (asset for asset in record.assets if asset.name == "config.json")
    assert json.loads(publisher.run.read_asset(config))["model_type"] == "llama"
    assert record.base == str(base.resolve())
    assert record.num_bytes == publisher.run.schema.num_bytes


def test_a_sharded_base_works_like_a_single_file(tmp_path: Path, board: Board) -> None:
    base = tiny_checkpoint(tmp_path / "tiny")
    with open_checkpoint(base) as checkpoint:
        write_checkpoint(tmp_path / "sharded", checkpoint, max_shard_bytes=100_000)
    with start(board, base) as one:
        pass
    with Publisher.start(board, "sharded", tmp_path / "sharded") as other:
        pass
    assert one.run.record.base_digest == other.run.record.base_digest


def test_starting_a_run_that_exists_is_refused(board: Board, base: Path) -> None:
    start(board, base).close()
    with pytest.raises(RunExistsError, match="resume"):
        start(board, base)


@pytest.mark.parametrize("base", ["/nowhere/base", "../missing dir", "a/b/c"])
def test_a_base_that_is_not_there_is_named(board: Board, base: str) -> None:
    with pytest.raises(UsageError, match="there is no base checkpoint"):
        Publisher.start(board, "r", base)
    assert board.runs() == []


def test_a_hub_name_that_cannot_be_had_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(name: str, **options: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UsageError, match="nor a hub model"):
        Publisher.start(board, "r", "someone/some-model")


def test_a_hub_name_is_fetched_and_recorded(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    place = tiny_checkpoint(tmp_path / "hub")
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with Publisher.start(board, "r", "someone/some-model") as publisher:
        assert publisher.run.record.base == "someone/some-model"
    with Publisher.resume(board, "r"):
        pass
    assert asked == ["someone/some-model"] * 2


def test_small_files_that_are_too_large_together_are_refused(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr("stitch.publish.base.MAX_ASSETS_BYTES", 1000)
    with pytest.raises(UsageError, match="at most 1000"):
        start(board, base)
    assert board.runs() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when_busy": "panic"}, "when_busy"),
        ({"anchor_every": 0}, "anchor_every"),
        ({"threads": -1}, "threads"),
        ({"decode": "some"}, "decode 'some' is not one of any, changed"),
        ({"encoding": "zip"}, "encoding 'zip' is not one of auto"),
        ({"encoding": "dense", "decode": "changed"}, "decode 'changed' allows gaps"),
        ({"colour": "red"}, r"unknown publisher options \['colour'\]"),
        ({"view": "fp3"}, "fp3"),
    ],
)
def test_options_are_checked_before_anything_is_written(
    board: Board, base: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Publisher.start(board, "r", base, **options)  # type: ignore[arg-type]
    assert board.runs() == []


def test_publishing_from_many_threads_makes_one_line_of_versions(
    board: Board, base: Path, model: TinyModel
) -> None:
    states = []
    for step in range(1, 5):
        model.train_step(step)
        state = model.state_dict()
        del state["head.weight"]  # copies are not tied any more
        states.append({name: tensor.clone() for name, tensor in state.items()})
    refs: dict[int, VersionRef] = {}
    with start(board, base, when_busy="block") as publisher:
        threads = [
            threading.Thread(
                target=lambda i=i: refs.update({i: publisher.publish(states[i], step=i).wait(60)})
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        wanted = [digest_of(view_of(state, publisher.run.schema)) for state in states]
    assert sorted(ref.version for ref in refs.values()) == [1, 2, 3, 4]
    run = board.open_run("r")
    for index, ref in refs.items():
        assert run.manifest(ref.version).digest_after == wanted[index]
        assert run.manifest(ref.version).step == index


def test_a_closed_publisher_refuses_and_closing_again_is_harmless(
    board: Board, base: Path, model: TinyModel
) -> None:
    publisher = start(board, base)
    ticket = publisher.publish(model)
    publisher.close()
    assert ticket.done
    publisher.close()
    with pytest.raises(PublisherClosedError, match="is closed"):
        publisher.publish(model)


def test_leaving_the_block_by_an_error_still_publishes_what_was_accepted(
    board: Board, base: Path, model: TinyModel
) -> None:
    def train() -> None:
        with start(board, base) as publisher:
            publisher.publish(model)
            raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError, match="the trainer broke"):
        train()
    assert board.open_run("r").newest() == 1


def test_a_forked_child_cannot_use_the_publisher(
    board: Board, base: Path, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(board, base) as publisher:
        real = os.getpid()
        monkeypatch.setattr("stitch.publish.publisher.os.getpid", lambda: real + 1)
        for call in (lambda: publisher.publish(model), publisher.flush, publisher.close):
            with pytest.raises(UsageError, match="forked"):
                call()
        publisher._at_exit()  # the child's exit leaves the parent's publisher alone
        monkeypatch.undo()
        assert publisher.publish(model).wait(60).version == 1


def test_opening_starts_a_run_and_then_resumes_it(
    board: Board, base: Path, model: TinyModel
) -> None:
    with Publisher.open(board, "r", base) as publisher:
        model.train_step(1)
        publisher.publish(model).wait(60)
    with Publisher.open(board, "r", base) as publisher:
        assert publisher.ref == VersionRef("r", 1)
    with pytest.raises(UsageError, match="publishes view 'bf16'"):
        Publisher.open(board, "r", base, view="checkpoint")


def test_a_board_may_be_given_by_its_address(tmp_path: Path, base: Path) -> None:
    with Publisher.start(str(tmp_path / "by-path"), "r", base) as publisher:
        assert publisher.run.board.runs() == ["r"]
