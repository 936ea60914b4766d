"""The codec's benchmark runs, says what the documentation quotes, and is fair in what it times:
every wire that others ship carries any step bit for bit, and notices what its proof covers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from stitch.codec import DigestState
from stitch.tensors import HostWeights, write_safetensors
from stitch.types import Schema, TensorSpec

ROOT = Path(__file__).parents[2]
PEERS = ("index+value", "grail", "grail+sha256", "xor+zstd1+xxh3")
PROVING = ("grail+sha256", "xor+zstd1+xxh3")
SHAPES = ((3, 70_001), (140_000, 2), (37,), (), (2, 3, 5), (1_000,))
Change = Callable[[np.ndarray[Any, Any]], None]


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return import_module("benchmarks._codec_timing")


def weights_of(shapes: tuple[tuple[int, ...], ...]) -> HostWeights:
    rng = np.random.default_rng(3)
    schema = Schema.of(TensorSpec.of(f"t{i}", "BF16", shape) for i, shape in enumerate(shapes))
    weights = HostWeights.allocate(schema)
    for index, spec in enumerate(schema.tensors):
        weights.words_at(index)[:] = rng.integers(0, 1 << 16, spec.num_words, np.uint16)
    return weights


def nothing(words: np.ndarray[Any, Any]) -> None:
    pass


def everything(words: np.ndarray[Any, Any]) -> None:
    words ^= 1


def both_ends(words: np.ndarray[Any, Any]) -> None:
    words[0] ^= 0x8000
    words[-1] ^= 3


def some(words: np.ndarray[Any, Any]) -> None:
    words[np.random.default_rng(5).random(words.size) < 0.01] += 1


def prepare(
    timing: ModuleType, name: str, cores: int, change: Change
) -> tuple[Any, HostWeights, HostWeights]:
    old, new = weights_of(SHAPES), weights_of(SHAPES)
    for index in range(len(SHAPES)):
        change(new.words_at(index))
    workers = timing.Workers(old, cores)
    (wire,) = timing.wires_for(old, [name], workers, DigestState.of(old))
    return wire, old, new


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("change", [nothing, everything, both_ends, some])
def test_a_peers_wire_carries_every_step_bit_for_bit(
    timing: ModuleType, name: str, cores: int, change: Change
) -> None:
    wire, old, new = prepare(timing, name, cores, change)
    for _ in range(2):  # the second time with buffers that have been used
        files = wire.encode(old, new)
        target = HostWeights.load(old)
        wire.apply(files, target)
        for index in range(len(SHAPES)):
            assert np.array_equal(target.words_at(index), new.words_at(index))


@pytest.mark.parametrize("name", PROVING)
def test_a_wire_with_a_proof_notices_another_base(timing: ModuleType, name: str) -> None:
    wire, old, new = prepare(timing, name, 1, some)
    files = wire.encode(old, new)
    old.words_at(0)[1] ^= 1
    with pytest.raises(ValueError, match=r"SHA-256|XXH3"):
        wire.apply(files, old)


@pytest.mark.parametrize("name", ["index+value", "grail"])
def test_a_sparse_wire_does_not_write_outside_a_tensor(timing: ModuleType, name: str) -> None:
    wire, old, new = prepare(timing, name, 1, both_ends)
    files = wire.encode(old, new)
    smaller = weights_of(tuple((max(1, shape[0] - 1), *shape[1:]) for shape in SHAPES if shape))
    with pytest.raises((ValueError, KeyError)):
        wire.apply(files, smaller)


def write_a_small_run(folder: Path) -> None:
    """A folder as that of the real data."""
    weights = weights_of(((64, 48), (100,)))
    write_safetensors(folder / "base.safetensors", weights)
    (folder / "adam1e6").mkdir()
    for step in range(1, 9):
        changes = {}
        for name in weights.schema.index:
            index = np.arange(step, weights.words(name).size, 17, dtype=np.uint32)
            weights.words(name)[index] += 1
            changes |= {f"{name}|index": index, f"{name}|bits": weights.words(name)[index]}
        np.savez(folder / "adam1e6" / f"step{step:03}.npz", **changes)


def run_benchmark(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.codec", "--elements", "40000"]
    command += ["--rounds", "1", "--seconds", "0.1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_prints_a_row_per_data_codec_and_cores_and_the_ratios(
    timing: ModuleType, tmp_path: Path
) -> None:
    write_a_small_run(tmp_path)
    arguments = ("--json", "--data", str(tmp_path), "--densities", "0.05,0.5,20")
    result = json.loads(run_benchmark(*arguments))
    names = timing.codec_names()
    assert set(names) >= {"gaps", "auto", "dense", *PEERS, "copy", "xxh3"}
    data = ["real", "synthetic 0.05%", "synthetic 0.5%", "synthetic 20%"]
    found = [(row["data"], row["cores"], row["codec"]) for row in result["rows"]]
    assert found == [(each, cores, name) for each in data for cores in (1, 2) for name in names]
    for row in result["rows"]:
        is_limit = row["codec"] in ("copy", "xxh3", "digest")
        assert (row["bytes_per_changed_element"] is None) == is_limit
        assert min(row["encode_gb_s"], row["apply_gb_s"]) > 0
        if row["data"] == "real":
            assert 0.05 < row["density"] < 0.07
            assert is_limit or len(row["bytes_by_step"]) == 8
        if row["data"] == "synthetic 20%":
            assert row["density"] == pytest.approx(0.2, rel=0.1)
    assert result["ratios"].keys() == result["wanted"].keys()
    assert result["ratios"].keys() >= {
        "gaps_bytes_real_mean",
        "gaps_encode_over_xor_0.5%",
        "gaps_apply_over_xor_0.05%",
        "gaps_apply_time_4n_over_n",
        "digest_over_copy",
        "two_cores_over_one_encode_gaps",
        "two_cores_over_one_apply_gaps",
        "peak_encode_buckets",
        "peak_apply_buckets",
    }


def test_parts_of_it_can_be_left_out_and_it_prints_tables() -> None:
    arguments = ("--no-real", "--no-memory", "--densities", "1", "--cores", "1")
    lines = run_benchmark(*arguments, "--codecs", "gaps,copy").splitlines()
    assert "| bytes per changed element | 1% |" in lines
    title = lines.index("| encode, GB/s of weights, 1 core | 1% |")
    assert [line.split()[1] for line in lines[title + 2 : title + 4]] == ["`gaps`", "`copy`"]
    assert not any("memory" in line or "real" in line for line in lines)
