"""diff, apply and inspect: round trips bit for bit, and refusals before anything is written."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from cli_kit import Program, make_chain, words_of

from stitch.cli import exits
from stitch.cli.flags import EncodingConfig
from stitch.codec.encodings import ENCODINGS
from stitch.tensors import HostWeights, open_checkpoint, write_safetensors
from stitch.testing.synthetic import synthetic_schema, synthetic_weights

INSPECT_KEYS = {
    "bytes",
    "num_elements",
    "num_changed",
    "density",
    "bits_per_changed_element",
    "encodings",
    "decode",
}


@pytest.fixture
def patches(stitch: Program, chain: list[Path], tmp_path: Path) -> list[Path]:
    """One patch file per step of the chain."""
    files = []
    for number, (old, new) in enumerate(itertools.pairwise(chain), start=1):
        files.append(tmp_path / f"step{number}.patch")
        stitch.ok("diff", old, new, "--out", files[-1])
    return files


def test_patches_rebuild_every_step_bit_for_bit(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    current = chain[0]
    for number, patch in enumerate(patches, start=1):
        record = stitch.ok("apply", current, patch, "--out", tmp_path / f"out{number}")
        assert record["verified"]
        current = tmp_path / f"out{number}"
        assert words_of(current) == words_of(chain[number])


def test_several_patches_apply_in_one_go(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    stitch.ok("apply", chain[0], *patches, "--out", tmp_path / "out")
    assert words_of(tmp_path / "out") == words_of(chain[-1])


def test_the_small_files_come_along_and_transformers_loads_the_result(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    stitch.ok("apply", chain[0], patches[0], "--out", out)
    assert (out / "config.json").read_bytes() == (chain[0] / "config.json").read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    name, parameter = next(iter(model.named_parameters()))
    assert (
        parameter.detach().view(-1).view(dtype=_uint16()).numpy().tobytes() == words_of(out)[name]
    )


def _uint16() -> object:
    import torch

    return torch.uint16


def test_inspect_tells_what_diff_did(stitch: Program, patches: list[Path]) -> None:
    record = stitch.ok("inspect", patches[0], "--tensors")
    assert record.keys() >= INSPECT_KEYS
    assert record["bytes"] == patches[0].stat().st_size
    assert 0 < record["num_changed"] < record["num_elements"]
    assert record["density"] == record["num_changed"] / record["num_elements"]
    assert record["bits_per_changed_element"] == 8 * record["bytes"] / record["num_changed"]
    assert sum(row["num_changed"] for row in record["tensors"]) == record["num_changed"]
    assert record["complete"]
    assert record["digest_before"] != record["digest_after"]
    text = stitch("inspect", patches[0], "--tensors").out
    assert "bits per changed element" in text
    assert "model.embed_tokens.weight" in text


def test_equal_checkpoints_give_an_empty_patch(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    patch = tmp_path / "none.patch"
    record = stitch.ok("diff", chain[0], chain[0], "--out", patch)
    assert (record["num_changed"], record["bits_per_changed_element"]) == (0, None)
    stitch.ok("apply", chain[0], patch, "--out", tmp_path / "out")
    assert words_of(tmp_path / "out") == words_of(chain[0])


@pytest.mark.parametrize("encoding", ["gaps", "ranks", "dense"])
def test_every_encoding_round_trips_between_single_files(
    stitch: Program, tmp_path: Path, encoding: str
) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    write_safetensors(old, synthetic_weights(synthetic_schema(), seed=1))
    write_safetensors(new, synthetic_weights(synthetic_schema(), seed=2))
    patch = tmp_path / "p.patch"
    record = stitch.ok("diff", old, new, "--out", patch, "--encoding", encoding)
    assert encoding in record["encodings"]
    stitch.ok("apply", old, patch, "--out", tmp_path / "out.safetensors")
    assert words_of(tmp_path / "out.safetensors") == words_of(new)
    stitch.ok("apply", old, patch, "--out", tmp_path / "out")
    assert words_of(tmp_path / "out" / "model.safetensors") == words_of(new)


def test_patches_for_receivers_without_a_copy_hold_gaps_only(
    stitch: Program, chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = tmp_path / "p.patch"
    stitch.ok("diff", *chain[:2], "--out", patch, "--decode", "changed")
    assert set(stitch.ok("inspect", patch)["encodings"]) <= {"gaps", "absent"}
    assert stitch.ok("inspect", patch)["decode"] == "changed"
    assert "only the words that change" in stitch("inspect", patch).out
    other = tmp_path / "other.patch"
    stitch.ok("diff", *chain[:2], "--out", other, "--encoding", "ranks")
    assert stitch.ok("inspect", other)["decode"] == "any"
    assert "whole buckets" in stitch("inspect", other).out
    monkeypatch.setenv("STITCH_DIFF_DECODE", "changed")
    stitch.ok("diff", *chain[:2], "--out", other)
    assert other.read_bytes() == patch.read_bytes()
    line = stitch.fails(exits.USAGE, "diff", *chain[:2], "--out", other, "--encoding", "dense")
    assert "decode 'changed' allows gaps" in line
    line = stitch.fails(exits.USAGE, "diff", *chain[:2], "--out", other, "--decode", "none")
    assert "decode must be one of any, changed" in line


def test_the_flag_offers_every_encoding() -> None:
    choices = get_type_hints(EncodingConfig)["encoding"]
    assert get_args(choices) == ("auto", *ENCODINGS)


def test_the_bf16_view_of_wide_checkpoints_can_be_compared(stitch: Program, tmp_path: Path) -> None:
    chain = make_chain(tmp_path / "wide", num_steps=1, dtype="F32")
    patch = tmp_path / "p.patch"
    stitch.ok("diff", *chain, "--out", patch, "--view", "bf16")
    stitch.ok("apply", chain[0], patch, "--out", tmp_path / "out", "--view", "bf16")
    with open_checkpoint(tmp_path / "out") as out:
        assert {spec.dtype for spec in out.schema.tensors} == {"BF16"}
    line = stitch.fails(2, "apply", chain[0], patch, "--out", tmp_path / "other")
    assert "another model or view" in line


def test_a_patch_for_other_weights_is_refused_before_writing(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = stitch.fails(exits.USAGE, "apply", chain[0], patches[1], "--out", out)
    expected = stitch.ok("inspect", patches[1])["digest_before"]
    found = stitch.ok("inspect", patches[0])["digest_before"]
    assert "step2.patch" in line
    assert expected in line
    assert found in line
    assert not out.exists()
    assert "step3.patch" in stitch.fails(
        exits.USAGE, "apply", chain[0], patches[0], patches[2], "--out", out
    )
    assert not out.exists()


def test_an_altered_patch_is_refused_before_writing(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    data = bytearray(patches[0].read_bytes())
    data[-3] ^= 1
    bad = tmp_path / "bad.patch"
    bad.write_bytes(data)
    line = stitch.fails(exits.USAGE, "apply", chain[0], bad, "--out", tmp_path / "out")
    assert "bad.patch" in line
    assert "checksum" in line
    assert not (tmp_path / "out").exists()
    bad.write_bytes(data[:50])
    assert "bad.patch" in stitch.fails(exits.USAGE, "inspect", bad)


def test_the_base_can_be_replaced_in_one_step(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(chain[0], base)
    stitch.ok("apply", base, patches[0], "--out", base)
    assert words_of(base) == words_of(chain[1])
    assert (base / "config.json").exists()
    file = tmp_path / "one.safetensors"
    shutil.copy(chain[0] / "model.safetensors", file)
    stitch.ok("apply", file, patches[0], "--out", file)
    assert words_of(file) == words_of(chain[1])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_directory_is_not_overwritten_unasked(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert "not empty" in stitch.fails(2, "apply", chain[0], patches[0], "--out", out)
    assert (out / "mine.txt").read_text() == "keep"
    stitch.ok("apply", chain[0], patches[0], "--out", out, "--overwrite")
    assert words_of(out) == words_of(chain[1])


def test_the_result_is_not_read_back_when_told_not_to(
    stitch: Program, chain: list[Path], patches: list[Path], tmp_path: Path
) -> None:
    record = stitch.ok("apply", chain[0], patches[0], "--out", tmp_path / "o", "--no-verify")
    assert not record["verified"]


def test_a_result_that_reads_back_altered_is_an_error(
    stitch: Program,
    chain: list[Path],
    patches: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import stitch.tensors as tensors

    honest = tensors.write_checkpoint

    def failing_disk(directory: Path, *arguments: object, **options: object) -> None:
        honest(directory, *arguments, **options)  # type: ignore[arg-type]
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x55")

    monkeypatch.setattr(tensors, "write_checkpoint", failing_disk)
    line = stitch.fails(2, "apply", chain[0], patches[0], "--out", tmp_path / "out")
    assert "reads back with digest" in line


def test_different_tensors_are_listed(stitch: Program, chain: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write_safetensors(other, synthetic_weights(synthetic_schema()))
    line = stitch.fails(2, "diff", chain[0], other, "--out", tmp_path / "p.patch")
    assert "only in the first" in line
    assert "model.layers.0.mlp.gate_proj.weight" in line
    assert "changed: model.layers.0.mlp.down_proj.weight BF16[64, 192] became" in line
    assert not (tmp_path / "p.patch").exists()


def test_diff_does_not_write_over_what_it_reads(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    old = tmp_path / "old.safetensors"
    shutil.copy(chain[0] / "model.safetensors", old)
    before = old.read_bytes()
    assert "is the input" in stitch.fails(2, "diff", old, chain[1], "--out", old)
    assert old.read_bytes() == before


def test_real_weight_changes_round_trip_step_by_step(
    stitch: Program, real_data: Path, tmp_path: Path
) -> None:
    """gaps needs at most 1.95 bytes per changed element there."""
    steps = sorted((real_data / "adam1e6").glob("step*.npz"))
    assert len(steps) == 8
    current = tmp_path / "base.safetensors"
    shutil.copy(real_data / "base.safetensors", current)
    with open_checkpoint(current) as checkpoint:
        weights = HostWeights.load(checkpoint)
    for step in steps:
        with np.load(step) as changes:
            for key in (key for key in changes.files if key.endswith("|index")):
                name = key.removesuffix("|index")
                weights.words(name)[changes[key]] = changes[f"{name}|bits"]
        truth = tmp_path / f"{step.stem}.safetensors"
        write_safetensors(truth, weights)
        patch = tmp_path / f"{step.stem}.patch"
        stitch.ok("diff", current, truth, "--out", patch, "--encoding", "gaps")
        record = stitch.ok("inspect", patch)
        assert record["bytes"] <= 1.95 * record["num_changed"]
        rebuilt = tmp_path / f"{step.stem}-rebuilt.safetensors"
        stitch.ok("apply", current, patch, "--out", rebuilt)
        assert words_of(rebuilt) == words_of(truth)
        current.unlink()
        truth.unlink()
        current = rebuilt


def test_the_installed_program_round_trips_too(chain: list[Path], tmp_path: Path) -> None:
    def program(*arguments: object) -> dict[str, object]:
        result = subprocess.run(
            [sys.executable, "-m", "stitch.cli", *map(str, arguments), "--json"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        loaded: dict[str, object] = json.loads(result.stdout)
        return loaded

    program("diff", chain[0], chain[1], "--out", tmp_path / "p.patch")
    assert program("inspect", tmp_path / "p.patch").keys() >= INSPECT_KEYS
    program("apply", chain[0], tmp_path / "p.patch", "--out", tmp_path / "out")
    assert words_of(tmp_path / "out") == words_of(chain[1])
