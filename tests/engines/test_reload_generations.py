"""Generations: old or new whatever happens, never a file written that an engine may have mapped."""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from reload_child import RUN, change_to, work, work_until
from reload_kit import digest_of, load, small_model

from stitch.codec import TensorUpdate, UpdateSet
from stitch.engines.reload import patching
from stitch.engines.reload.generations import RECORD, Generation, Generations
from stitch.errors import CorruptCheckpointError, EngineError, StitchError, UsageError
from stitch.tensors import HostWeights, open_checkpoint, write_checkpoint
from stitch.testing.engine_contract import dense_update, flip_update
from stitch.testing.tiny import tiny_checkpoint
from stitch.types import VersionRef

ONE = VersionRef(RUN, 1)
TWO = VersionRef(RUN, 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, as large ones come."""
    place = tmp_path_factory.mktemp("reload")
    whole = small_model(place / "whole")
    with open_checkpoint(whole) as checkpoint:
        write_checkpoint(place / "base", checkpoint, assets_from=checkpoint, max_shard_bytes=6000)
    assert len(list((place / "base").glob("*.safetensors"))) > 3
    return place / "base"


@pytest.fixture
def opened(base: Path, tmp_path: Path) -> Iterator[Generations]:
    generations = Generations.open(tmp_path / "engine", base, "bf16", run=RUN, threads=1)
    yield generations
    generations.close()


def reopened(opened: Generations, base: Path) -> Generations:
    opened.close()
    return Generations.open(opened.directory, base, "bf16", run=RUN, threads=1)


def files(generation: Generation) -> dict[str, Path]:
    return {path.name: path for path in generation.path.glob("*.safetensors")}


def only(weights: HostWeights, name: str) -> UpdateSet:
    """The lowest bit of one word of one tensor."""
    index = weights.schema.index[name]
    old = weights.words_at(index)[3:4].copy()
    update = TensorUpdate(
        tensor=index, positions=np.array([3]), new=old ^ old.dtype.type(1), old=old
    )
    return UpdateSet([update])


def test_the_first_generation_is_the_base_as_an_ordinary_checkpoint(
    opened: Generations, base: Path
) -> None:
    assert opened.current.ref is None
    assert digest_of(load(opened.link)) == digest_of(load(base))
    wanted = {path.name for path in base.iterdir()}
    assert {path.name for path in opened.current.path.iterdir()} == wanted | {RECORD}
    for name, file in files(opened.current).items():
        assert not os.path.samefile(file, base / name)


def test_a_base_that_is_served_rounded_is_written_rounded(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "f32", hidden=16, layers=1, heads=2, kv_heads=1, dtype="F32")
    generations = Generations.open(tmp_path / "engine", model, "bf16", run=RUN)
    assert {spec.dtype for spec in load(generations.link).schema.tensors} == {"BF16"}
    assert (generations.link / "tokenizer.json").exists()
    generations.close()


@pytest.mark.parametrize("change", [flip_update, lambda weights, seed: dense_update(weights)])
def test_a_new_generation_is_the_old_one_after_the_update(
    opened: Generations, change: Callable[[HostWeights, int], UpdateSet]
) -> None:
    weights = load(opened.link)
    update = change(weights, 1)
    built = opened.build(update, ONE)
    assert digest_of(load(opened.link)) == digest_of(weights)
    update.apply(weights)
    assert digest_of(load(built.path)) == digest_of(weights) == built.digest
    assert built.ref == ONE


def test_no_file_is_written_that_an_engine_may_have_mapped(opened: Generations) -> None:
    weights = load(opened.link)
    old = files(opened.current)
    bytes_before = {name: path.read_bytes() for name, path in old.items()}
    mapped = {}
    for name, path in old.items():
        with path.open("rb") as file:
            mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    name = "model.norm.weight"
    built = opened.build(only(weights, name), ONE)
    with open_checkpoint(opened.current.path) as checkpoint:
        touched = checkpoint.place_of(name)[0].name
    new = files(built)
    shared = {name for name in new if os.path.samefile(new[name], old[name])}
    assert shared == new.keys() - {touched}  # what did not change costs no space
    opened.switch(built)
    opened.drop(Generation(path=old[touched].parent, ref=None, digests=built.digests))
    for name, data in bytes_before.items():
        assert mapped[name][:] == data
        mapped[name].close()


def test_words_that_lie_askew_in_their_file_are_changed_too(tmp_path: Path) -> None:
    """Other writers pad no headers."""
    model = small_model(tmp_path / "model")
    file = model / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    generations = Generations.open(tmp_path / "engine", model, "bf16", run=RUN)
    weights = load(model)
    update = dense_update(weights)
    built = generations.build(update, ONE)
    update.apply(weights)
    assert digest_of(load(built.path)) == digest_of(weights)
    generations.close()


def test_files_are_copied_where_the_system_cannot_share(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> int:
        raise OSError(18, "not here")

    monkeypatch.setattr(patching.os, "copy_file_range", unable)
    monkeypatch.setattr(patching.os, "link", unable)
    generations = Generations.open(tmp_path / "engine", base, "bf16", run=RUN)
    weights = load(base)
    update = flip_update(weights, 1)
    built = generations.build(update, ONE)
    update.apply(weights)
    assert digest_of(load(built.path)) == digest_of(weights)
    generations.close()


def wild(weights: HostWeights) -> UpdateSet:
    words = np.zeros(1, weights.words_at(0).dtype)
    return UpdateSet(
        [
            TensorUpdate(
                tensor=0,
                positions=np.array([weights.words_at(0).size]),
                new=words + words.dtype.type(1),
                old=words,
            )
        ]
    )


def lying(weights: HostWeights) -> UpdateSet:
    (good,) = only(weights, "model.norm.weight").updates
    other = good.old ^ good.old.dtype.type(4)
    return UpdateSet(
        [TensorUpdate(tensor=good.tensor, positions=good.positions, new=good.new, old=other)]
    )


def nowhere(weights: HostWeights) -> UpdateSet:
    words = np.zeros(1, np.uint16)
    return UpdateSet(
        [TensorUpdate(tensor=999, positions=np.array([0]), new=words + np.uint16(1), old=words)]
    )


@pytest.mark.parametrize("update_of", [wild, lying, nowhere])
def test_an_update_that_does_not_fit_leaves_nothing(
    opened: Generations, update_of: Callable[[HostWeights], UpdateSet]
) -> None:
    with pytest.raises(EngineError):
        opened.build(update_of(load(opened.link)), ONE)
    assert os.listdir(opened.current.path.parent) == [opened.current.path.name]


def test_a_full_disk_leaves_nothing(opened: Generations, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    weights = load(opened.link)
    with monkeypatch.context() as patch:
        patch.setattr(patching.os, "fsync", full)
        with pytest.raises(EngineError, match="No space left"):
            opened.build(flip_update(weights, 1), ONE)
    assert os.listdir(opened.current.path.parent) == [opened.current.path.name]
    opened.build(flip_update(weights, 1), ONE)


def test_bits_that_rot_on_the_way_are_noticed(
    opened: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read back is compared with what the version must be."""
    link = patching.link_file

    def rotten(source: Path, target: Path) -> None:
        if source.suffix != ".safetensors":
            return link(source, target)
        data = bytearray(source.read_bytes())
        data[-1] ^= 8
        target.write_bytes(bytes(data))
        return None

    monkeypatch.setattr("stitch.engines.reload.generations.link_file", rotten)
    with pytest.raises(EngineError, match="the version has"):
        opened.build(only(load(opened.link), "model.norm.weight"), ONE)
    assert os.listdir(opened.current.path.parent) == [opened.current.path.name]


def test_what_was_proven_is_taken_up_again(opened: Generations, base: Path) -> None:
    weights = load(base)
    update = flip_update(weights, 1)
    opened.switch(opened.build(update, ONE))
    update.apply(weights)
    again = reopened(opened, base)
    assert again.current.ref == ONE
    assert again.current.digest == digest_of(weights)
    assert os.listdir(again.current.path.parent) == [again.current.path.name]
    again.close()


def test_what_was_left_half_done_takes_no_room_while_the_base_is_written(
    opened: Generations, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = opened.current.path.parent
    for name in (".half.tmp", "00000005"):
        shutil.copytree(opened.current.path, home / name)
    flip(opened.current.path)
    found: set[str] = set()
    write = patching.copy_file

    def looking(source: Path, target: Path) -> None:
        found.update(path.name for path in home.iterdir() if path != target.parent)
        write(source, target)

    monkeypatch.setattr("stitch.engines.reload.generations.copy_file", looking)
    again = reopened(opened, base)
    assert found == {opened.current.path.name}  # an engine may load it meanwhile
    again.close()


def test_a_label_that_cannot_be_written_is_not_taken(
    opened: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stitch.tensors.durable.os.fsync", full)
    with pytest.raises(StitchError, match="No space left"):
        opened.relabel(ONE)
    assert opened.current.ref is None


def truncate(path: Path) -> None:
    file = min(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 9)


def flip(path: Path) -> None:
    file = max(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def lose(path: Path) -> None:
    min(path.glob("*.safetensors")).unlink()


def rename_a_tensor(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.morn.weight"))
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.morn.weight"))


def reshape(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"[301,16]", b"[16,301]"))


def add_a_stray(path: Path) -> None:
    shutil.copy(min(path.glob("*.safetensors")), path / "consolidated.safetensors")


def lead_elsewhere(path: Path) -> None:
    file = min(path.glob("*.safetensors"))
    target = path.parents[2] / "elsewhere.safetensors"
    shutil.move(file, target)
    file.symlink_to(target)


def forget_the_record(path: Path) -> None:
    (path / RECORD).unlink()


def garble_the_record(path: Path) -> None:
    (path / RECORD).write_bytes(b'{"format": 1, "ref": {"run": "killed", "version": true}')


def lie_in_the_record(path: Path) -> None:
    record = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps({**record, "digest": "0" * 32}))


def take_the_folder(path: Path) -> None:
    shutil.rmtree(path)


def climb_out(path: Path) -> None:
    link = path.parents[1] / "current"
    link.unlink()
    link.symlink_to("generations/../../base")


@pytest.mark.parametrize(
    "damage",
    [
        truncate, flip, lose, rename_a_tensor, reshape, add_a_stray, lead_elsewhere,
        forget_the_record, garble_the_record, lie_in_the_record, take_the_folder, climb_out,
    ],
)  # fmt: skip
def test_a_damaged_generation_is_made_anew_from_the_base(
    opened: Generations, base: Path, damage: Callable[[Path], None]
) -> None:
    opened.switch(opened.build(flip_update(load(base), 1), ONE))
    damage(opened.current.path)
    again = reopened(opened, base)
    assert again.current.ref is None
    assert digest_of(load(again.link)) == digest_of(load(base)) == again.current.digest
    assert os.listdir(again.current.path.parent) == [again.current.path.name]
    again.close()


@pytest.mark.parametrize("damage", [truncate, lose, rename_a_tensor])
def test_a_damaged_current_generation_is_said_when_it_is_looked_at(
    opened: Generations, damage: Callable[[Path], None]
) -> None:
    damage(opened.current.path)
    with pytest.raises(StitchError):
        opened.prove()


def test_a_damaged_base_is_said(base: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(base, bad)
    truncate(bad)
    with pytest.raises(CorruptCheckpointError):
        Generations.open(tmp_path / "engine", bad, "bf16", run=RUN)
    Generations.open(tmp_path / "engine", base, "bf16", run=RUN).close()


def test_a_directory_of_something_else_is_left_alone(base: Path, tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis").write_text("...")
    with pytest.raises(UsageError, match="not empty"):
        Generations.open(precious, base, "bf16", run=RUN)
    assert [path.name for path in precious.iterdir()] == ["thesis"]


def test_two_replicas_do_not_share_a_directory(opened: Generations, base: Path) -> None:
    with pytest.raises(UsageError, match="in use"):
        Generations.open(opened.directory, base, "bf16", run=RUN)


def test_one_file_is_no_directory_for_an_engine(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one file"):
        Generations.open(tmp_path / "engine", min(base.glob("*.safetensors")), "bf16", run=RUN)


def test_quantised_checkpoints_are_refused(base: Path, tmp_path: Path) -> None:
    quantised = tmp_path / "fp8"
    shutil.copytree(base, quantised)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quantised"):
        Generations.open(tmp_path / "engine", quantised, "bf16", run=RUN)


# --- killed ------------------------------------------------------------------------------------


@cache
def digests(base: Path) -> list[str]:
    """Of versions 0 to 2."""
    weights = load(base)
    found = [digest_of(weights)]
    for version in (1, 2):
        change_to(version, weights).apply(weights)
        found.append(digest_of(weights))
    return found


KILLS = [
    # (where, the version found afterwards); in the order of one life
    ("reload.recorded:1", 0),
    ("reload.built:1", 0),
    ("reload.switched:1", 0),
    ("tensors.file.written:2", 0),  # the label of the base
    ("tensors.file.renamed:2", 0),
    ("reload.patched:1", 0),
    ("reload.patched:3", 0),
    ("tensors.file.written:3", 0),  # the record of version 1
    ("tensors.file.renamed:3", 0),
    ("reload.recorded:2", 0),
    ("reload.built:2", 0),
    ("reload.paused:1", 0),
    ("reload.switched:2", 1),
    ("reload.loaded:1", 1),
    ("reload.resumed:1", 1),
    ("reload.dropping:1", 1),  # the base, once version 2 is staged
    ("reload.built:3", 1),
    ("reload.switched:3", 2),
]


@pytest.mark.parametrize(("failpoint", "version"), KILLS)
def test_killed_at_any_step_the_old_or_the_new_version_is_left(
    failpoint: str, version: int, base: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "engine"
    # Forked from a process that has imported everything: a fresh one takes seconds.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["reload_child"])
    killed = forks.Process(target=work_until, args=(failpoint, directory, base, 2))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    generations = Generations.open(directory, base, "bf16", run=RUN, threads=1)
    found = generations.current
    assert (found.ref.version if found.ref else 0) == version
    assert digest_of(load(generations.link)) == found.digest == digests(base)[version]
    assert os.listdir(found.path.parent) == [found.path.name]
    generations.close()
    asyncio.run(work(directory, base, 2))
    generations = Generations.open(directory, base, "bf16", run=RUN, threads=1)
    assert generations.current.ref == TWO
    assert generations.current.digest == digests(base)[2]
    generations.close()
