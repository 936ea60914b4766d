"""Checkpoint directories: single files, shard indexes, hostile file names, assets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from stitch.errors import CorruptCheckpointError, UsageError
from stitch.tensors import HostWeights, open_checkpoint, read_all, write_safetensors
from stitch.types import Schema, TensorSpec

INDEX = "model.safetensors.index.json"


def weights_with(**values: int) -> HostWeights:
    schema = Schema.of(TensorSpec.of(name, "U8", [4]) for name in values)
    weights = HostWeights.allocate(schema)
    for name, value in values.items():
        weights.words(name)[:] = value
    return weights


def sharded(folder: Path, **homes: str) -> Path:
    """A directory whose tensors (name -> shard) hold 1, 2, 3 ... in keyword order."""
    folder.mkdir(exist_ok=True)
    values = {name: number for number, name in enumerate(homes, start=1)}
    for file_name in set(homes.values()):
        held = {name: values[name] for name, home in homes.items() if home == file_name}
        write_safetensors(folder / file_name, weights_with(**held))
    write_index(folder, homes)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_sharded_directory_reads_as_one_checkpoint(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors", b="y.safetensors", c="x.safetensors")
    for path in (folder, folder / INDEX):
        with open_checkpoint(path) as checkpoint:
            assert [path.name for path in checkpoint.files] == ["x.safetensors", "y.safetensors"]
            assert [read_all(checkpoint, name)[0] for name in "abc"] == [1, 2, 3]
            assert checkpoint.path == folder


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors")
    write_safetensors(folder / "model.safetensors", weights_with(a=9))
    with open_checkpoint(folder) as checkpoint:
        assert read_all(checkpoint, "a")[0] == 9


def test_a_hub_cache_of_symbolic_links_works(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    real = sharded(tmp_path / "real", a="x.safetensors", b="y.safetensors")
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(real.iterdir())):
        path.rename(blobs / f"sha{number}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"sha{number}")
    with open_checkpoint(snapshot) as checkpoint:
        assert [read_all(checkpoint, name)[0] for name in "ab"] == [1, 2]


@pytest.mark.parametrize(
    "file_name",
    [
        "../x.safetensors",
        "sub/x.safetensors",
        "/etc/x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "x.safetensors\0",
        "x.safetensors\n",
        ".x.safetensors",
        "",
        "..",
        "x.bin",
        "model.safetensors.index.json",
        "x" * 300 + ".safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_an_index_that_names_anything_but_a_plain_file_is_refused(
    tmp_path: Path, file_name: object
) -> None:
    write_safetensors(tmp_path / "x.safetensors", weights_with(a=1))
    folder = tmp_path / "m"
    sharded(folder, a="x.safetensors")
    (folder / "sub").symlink_to(tmp_path)
    write_index(folder, {"a": file_name})
    with pytest.raises(CorruptCheckpointError, match="plain names"):
        open_checkpoint(folder)


def test_names_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors", b="X.safetensors")
    with pytest.raises(CorruptCheckpointError, match="differ only in case"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        "\xff",
        "[" * 100_000,
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors")
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "x.safetensors"}, "1 not in the index ['c']"),
        ({"a": "x.safetensors", "c": "x.safetensors", "d": "x.safetensors"}, "1 missing ['d']"),
        ({"a": "x.safetensors", "c": "x.safetensors", "b": "z.safetensors"}, "it is missing"),
        ({"a": "y.safetensors", "b": "y.safetensors"}, "1 missing ['a']"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, str], words: str
) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors", b="y.safetensors", c="x.safetensors")
    write_index(folder, weight_map)
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)


def test_a_refused_directory_leaves_no_descriptor_open(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors", b="y.safetensors")
    (folder / "y.safetensors").write_bytes(b"no")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptCheckpointError, match=r"y\.safetensors"):
        open_checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_without_a_checkpoint_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"):
        open_checkpoint(tmp_path)


def test_a_dangling_link_is_a_clear_error(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors")
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("gone")
    with pytest.raises(CorruptCheckpointError, match="it is missing"):
        open_checkpoint(folder)


def test_assets_are_the_small_files_beside_the_weights(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", a="x.safetensors")
    for name in ["tokenizer.json", "config.json", "merges.txt", "chat_template.jinja"]:
        (folder / name).write_text("small")
    for name in ["old.bin", "opt.PT", "rng.pth", "m.gguf", ".gitattributes", "a b.txt"]:
        (folder / name).write_text("left out")
    (folder / "folder").mkdir()
    with (folder / "large.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (folder / "gone.json").symlink_to("nowhere")
    with open_checkpoint(folder) as checkpoint:
        names = [path.name for path in checkpoint.assets()]
    assert names == ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"]
    with open_checkpoint(folder / "x.safetensors") as checkpoint:
        assert checkpoint.assets() == ()


def test_two_threads_read_one_checkpoint(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    schema = Schema.of([TensorSpec.of("t", "U32", [100_000])])
    weights = HostWeights(schema, [np.arange(100_000, dtype=np.uint32)])
    write_safetensors(tmp_path / "t.safetensors", weights)
    with open_checkpoint(tmp_path / "t.safetensors") as checkpoint, ThreadPoolExecutor(4) as pool:
        starts = range(0, 100_000, 1000)
        parts = list(pool.map(lambda s: checkpoint.read("t", s, s + 1000), starts))
    assert (np.concatenate(parts) == np.arange(100_000)).all()
