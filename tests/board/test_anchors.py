"""Anchors: checkpoint directories in and out, proven, and whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from board_kit import NO_WAITS, SCHEMA, digest, manifest, new_run, publish_through, run_record
from safetensors.numpy import load_file, save_file

from stitch.board import Board, Run, keys, plan_route
from stitch.board.anchor_list import AnchorList
from stitch.board.anchors import local_name
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    CorruptRecordError,
    StoreFullError,
    UsageError,
    VersionNotFoundError,
)
from stitch.testing.faults import FaultyStore

WEIGHTS = {"a": np.arange(600, dtype=np.float32), "b": np.ones((3, 4), dtype=np.uint16)}
CONFIG = b'{"model_type": "llama"}'


def single(directory: Path) -> Path:
    directory.mkdir()
    save_file(WEIGHTS, directory / "model.safetensors")
    (directory / "config.json").write_bytes(b"not stored with the anchor")
    return directory


def sharded(directory: Path) -> Path:
    directory.mkdir()
    names = {f"model-{i:05d}-of-00002.safetensors": key for i, key in enumerate("ab", 1)}
    for name, key in names.items():
        save_file({key: WEIGHTS[key]}, directory / name)
    index = {"metadata": {}, "weight_map": {key: name for name, key in names.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "stray.safetensors").write_bytes(b"not in the index")
    return directory


@pytest.fixture
def run(board: Board) -> Run:
    config = board.put_asset("math", "config.json", CONFIG)
    return board.create_run(run_record(assets=(config,)), SCHEMA)


@pytest.mark.parametrize("make", [single, sharded])
def test_an_anchor_comes_back_as_an_ordinary_checkpoint_directory(
    run: Run, tmp_path: Path, make: object
) -> None:
    publish_through(run, 3)
    directory = make(tmp_path / "in")  # type: ignore[operator]
    seen: list[tuple[int, int]] = []
    record = run.write_anchor(3, directory, writer="w", progress=lambda *done: seen.append(done))
    assert seen[-1] == (record.num_bytes, record.num_bytes)
    assert run.anchors() == [3]
    assert run.anchor(3) == record
    assert run.anchor(2) is None
    assert record.digest == digest(3)
    fetched = run.board.open_run("math").fetch_anchor(record, tmp_path / "deep" / "out", None)
    names = sorted(path.name for path in fetched.iterdir())
    wanted = [path.name for path in directory.iterdir()] + ["config.json"]
    assert names == sorted(set(wanted) - {"stray.safetensors"})
    assert (fetched / "config.json").read_bytes() == CONFIG
    found: dict[str, np.ndarray] = {}
    for path in fetched.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == WEIGHTS.keys()
    assert all(np.array_equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_the_index_comes_first_and_stored_names_belong_to_one_attempt(
    run: Run, tmp_path: Path
) -> None:
    record = run.write_anchor(0, sharded(tmp_path / "in"), writer="w")
    names = [ref.name for ref in record.files]
    assert [local_name(name) for name in names] == [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert len({name.split("-")[1] for name in names}) == 1


def test_progress_reaches_the_end_and_an_empty_directory_is_filled(
    run: Run, tmp_path: Path
) -> None:
    record = run.write_anchor(0, single(tmp_path / "in"), writer="w")
    (tmp_path / "out").mkdir()
    seen: list[tuple[int, int]] = []
    run.fetch_anchor(record, tmp_path / "out", lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] == record.num_bytes + len(CONFIG)
    with pytest.raises(UsageError, match="not an empty directory"):
        run.fetch_anchor(record, tmp_path / "out")


def test_file_systems_that_cannot_sync_folders_hold_checkpoints_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_through(run, 1)
    record = run.write_anchor(1, single(tmp_path / "in"), writer="w")
    real_sync, refused = os.fsync, []

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "planned")
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    fetched = run.fetch_anchor(record, tmp_path / "out")
    assert refused
    np.testing.assert_array_equal(load_file(fetched / "model.safetensors")["a"], WEIGHTS["a"])


def test_a_second_anchor_of_a_version_keeps_the_first(run: Run, tmp_path: Path) -> None:
    first = run.write_anchor(0, single(tmp_path / "one"), writer="w1")
    assert run.write_anchor(0, sharded(tmp_path / "two"), writer="w2") == first
    assert run.anchor(0) == first


def test_planning_reads_a_hint_instead_of_listing_all_versions(
    board: Board, run: Run, tmp_path: Path
) -> None:
    publish_through(run, 3)
    run.write_anchor(2, single(tmp_path / "in"), writer="w")
    store = FaultyStore(board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    assert [step.to_version for step in plan_route(reader, None, 3).steps] == [2, 3]
    assert store.counts["list"] == 0
    for hint in (b"{}", b"\0" * 9, AnchorList(run="math", versions=(1,)).to_json_bytes(),
                 AnchorList(run="x", versions=(2,)).to_json_bytes()):  # fmt: skip
        board.store.put("math/anchors.json", hint, mode="overwrite")
        assert [step.to_version for step in plan_route(reader, None, 3).steps] == [2, 3]
    assert store.counts["list"] == 4
    with pytest.raises(CorruptRecordError, match="field versions"):
        AnchorList.parse(b'{"format":1,"run":"math","versions":[1,true]}', "k")
    failing = FaultyStore(board.store)
    failing.fail("anchors.json", times=None)
    writer = Board(failing, patience=NO_WAITS).open_run("math")
    writer.write_anchor(3, tmp_path / "in", writer="w")
    assert run.anchors() == [2, 3]


@pytest.mark.parametrize("versions", ["{}", "[true]", "[1, -1]", '["1"]', "[1.0]", "[100000000]"])
def test_a_list_of_anchors_holds_versions_only(versions: str) -> None:
    data = f'{{"format": 1, "run": "math", "versions": {versions}}}'.encode()
    with pytest.raises(CorruptRecordError, match=r"k: field versions(\[\d\])? is .*, wanted a"):
        AnchorList.parse(data, "k")


def test_an_anchor_of_other_content_or_of_no_version_is_refused(run: Run, tmp_path: Path) -> None:
    record = run.write_anchor(0, single(tmp_path / "one"), writer="w1")
    publish_through(run, 1)
    with pytest.raises(BaseMismatchError, match="math@1"):
        run.commit_anchor(dataclasses.replace(record, version=1))
    with pytest.raises(VersionNotFoundError):
        run.write_anchor(2, tmp_path / "one", writer="w")
    with pytest.raises(CorruptBlobError, match="v/00000001/anchor-"):
        run.commit_anchor(dataclasses.replace(record, version=1, digest=digest(1)))
    assert run.anchors() == [0]


@pytest.mark.parametrize("damage", ["short", "flipped", "missing"])
def test_a_damaged_anchor_file_leaves_no_directory(
    board: Board, run: Run, tmp_path: Path, damage: str
) -> None:
    record = run.write_anchor(0, sharded(tmp_path / "in"), writer="w")
    key = keys.blob("math", 0, record.files[-1].name)
    store = FaultyStore(board.store)
    reader = Board(store, patience=NO_WAITS).open_run("math")
    if damage == "short":
        store.shorten(key, keep=20, times=None)
    elif damage == "flipped":
        store.flip(key, offset=-1, times=None)
    else:
        store.hide(key, times=None)
    with pytest.raises(CorruptBlobError, match=key):
        reader.fetch_anchor(record, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    staged = {path.name for path in (tmp_path / ".out.partial").iterdir()}
    assert staged == {f"{file.blake3}.partial" for file in record.files[:-1]}
    store.heal()
    reader.fetch_anchor(record, tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


def test_a_full_disk_is_named_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run.write_anchor(0, single(tmp_path / "in"), writer="w")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stitch.board.anchors.os.fsync", full)
    with pytest.raises(StoreFullError, match="No space left"):
        run.fetch_anchor(record, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.parametrize(
    "name",
    ["anchor-1-../x.safetensors", "anchor-1-config.json", "anchor-1-.x.safetensors", "config.json"],
)
def test_anchor_records_cannot_name_other_files(board: Board, run: Run, name: str) -> None:
    file = {"name": name, "num_bytes": 1, "blake3": "ab" * 32}
    record = {
        "format": 1, "run": "math", "version": 1, "digest": digest(1), "schema_digest": "0" * 32,
        "files": [file], "num_bytes": 1, "created_unix_s": 0, "writer": "w",
    }  # fmt: skip
    board.store.put(keys.anchor("math", 1), json.dumps(record).encode(), mode="create")
    with pytest.raises(CorruptRecordError, match=r"v/00000001/anchor\.json: field files"):
        run.anchor(1)


def test_two_files_that_would_become_one_are_refused(board: Board, run: Run) -> None:
    files = [
        {"name": f"anchor-{attempt}-model.safetensors", "num_bytes": 1, "blake3": "ab" * 32}
        for attempt in "12"
    ]
    record = {
        "format": 1, "run": "math", "version": 1, "digest": digest(1), "schema_digest": "0" * 32,
        "files": files, "num_bytes": 2, "created_unix_s": 0, "writer": "w",
    }  # fmt: skip
    board.store.put(keys.anchor("math", 1), json.dumps(record).encode(), mode="create")
    with pytest.raises(CorruptRecordError, match="one checkpoint file twice"):
        run.anchor(1)


@pytest.mark.parametrize(
    "shards", [["../x.safetensors"], ["/etc/passwd"], ["config.json"], [7], []]
)
def test_an_index_that_names_other_files_is_refused(
    run: Run, tmp_path: Path, shards: list[object]
) -> None:
    directory = sharded(tmp_path / "in")
    index = {"weight_map": {str(i): name for i, name in enumerate(shards)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError):
        run.write_anchor(0, directory, writer="w")


def test_a_directory_without_clear_weights_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds 0 safetensors files"):
        run.write_anchor(0, tmp_path / "empty", writer="w")


def test_anchors_are_listed_as_numbers_and_strays_are_ignored(board: Board) -> None:
    run = new_run(board)
    versions = [9, 10, 99, 100, 999_999, 1_000_000]
    for version in reversed(versions):
        board.store.put(keys.anchor("math", version), b"{}", mode="create")
    for stray in ("v/latest/anchor.json", "v/7/anchor.json", "v/00000003/x/anchor.json"):
        board.store.put(f"math/{stray}", b"{}", mode="create")
    assert run.anchors() == versions
    assert manifest(run, 1, ()).run == "math"
