"""publish, log, show, checkout, anchor and verify of checkpoints, on a board in a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_kit import Program, Published, make_chain, words_of

from stitch.cli import exits
from stitch.testing.tiny import tiny_checkpoint


def test_publishing_creates_a_run_and_then_continues_it(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    board = ("--board", tmp_path / "board")
    first = stitch.ok(
        "publish", chain[1], *board, "--run", "math", "--base", chain[0], "--step", 10
    )
    assert (first["run"], first["version"], first["step"]) == ("math", 1, 10)
    assert 0 < first["density"] < 0.1
    assert first["bytes"] < 0.2 * stitch.ok("log", *board)["view_bytes"]
    second = stitch("publish", chain[2], *board)
    assert second.code == 0
    assert second.out.startswith("published math@2: ")
    assert stitch.ok("verify", chain[2], *board)["equal"]


def test_publishing_for_receivers_without_a_copy_is_a_flag_a_variable_and_a_line_of_the_file(
    stitch: Program, chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = ("--board", tmp_path / "board")
    publish = ("publish", *board, "--run", "math")
    first = stitch.ok(*publish, chain[1], "--base", chain[0], "--encoding", "dense")
    assert set(first["encodings"]) == {"dense"}
    second = stitch.ok(*publish, chain[2], "--decode", "changed")
    assert set(second["encodings"]) == {"gaps"}
    monkeypatch.setenv("STITCH_PUBLISH_DECODE", "changed")
    assert "allows gaps" in stitch.fails(2, *publish, chain[3], "--encoding", "ranks")
    monkeypatch.delenv("STITCH_PUBLISH_DECODE")
    file = tmp_path / "stitch.toml"
    file.write_text('[publish]\nencoding = "gaps"\n')
    third = stitch.ok(*publish, chain[3], "--config", file)
    assert set(third["encodings"]) == {"gaps"}
    assert stitch.ok("verify", chain[3], *board)["equal"]


def test_publishing_needs_a_run_and_a_base_for_a_new_one(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    board = ("--board", tmp_path / "board")
    assert "name one with --run" in stitch.fails(2, "publish", chain[1], *board)
    assert "give --base" in stitch.fails(2, "publish", chain[1], *board, "--run", "math")
    assert stitch("log", *board, "--run", "math").code != 0


def test_publishing_another_model_is_refused(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "other", hidden=32)
    line = stitch.fails(2, "publish", other, *published.args)
    assert "model.embed_tokens.weight" in line
    assert stitch.ok("log", *published.args)["newest"] == 3


def test_publishing_a_view_that_the_run_does_not_have_is_refused(
    stitch: Program, published: Published
) -> None:
    line = stitch.fails(2, "publish", published.chain[1], *published.args, "--view", "checkpoint")
    assert "publishes view 'bf16', not 'checkpoint'" in line


def test_the_log_lists_versions_newest_first(stitch: Program, published: Published) -> None:
    record = stitch.ok("log", *published.args)
    assert [row["version"] for row in record["versions"]] == [3, 2, 1, 0]
    assert [row["step"] for row in record["versions"]] == [30, 20, 10, None]
    assert record["versions"][0]["share_of_view"] < 0.2
    short = stitch.ok("log", *published.args, "-n", 2)
    assert [row["version"] for row in short["versions"]] == [3, 2]
    lines = stitch("log", *published.args).out.splitlines()
    assert lines[0].split()[:2] == ["version", "step"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1", "0"]


def test_show_tells_everything_about_a_version(stitch: Program, published: Published) -> None:
    record = stitch.ok("show", *published.args)
    assert (record["version"], record["step"], record["kind"]) == (3, 30, "patch")
    assert record["digest_before"] == stitch.ok("show", "2", *published.args)["digest_after"]
    assert record["anchor"] is None
    base = stitch.ok("show", "0", *published.args)
    assert (base["version"], base["view"]) == (0, "bf16")
    text = stitch("show", "3", *published.args).out
    assert "digest_after" in text
    assert "blake3" in text


@pytest.mark.parametrize("version", ["4", "99999999"])
def test_versions_that_do_not_exist_are_usage_errors(
    stitch: Program, published: Published, version: str, tmp_path: Path
) -> None:
    for call in (["show", version], ["checkout", version, "--out", tmp_path / "o"]):
        assert version in stitch.fails(exits.USAGE, *call, *published.args)


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "v1", "100000000"])
def test_what_is_no_version_number_is_refused(
    stitch: Program, published: Published, version: str
) -> None:
    assert stitch("show", version, *published.args).code == exits.USAGE


@pytest.mark.parametrize("version", ["0", "1", "2", "latest"])
def test_checkout_writes_any_version_bit_for_bit(
    stitch: Program, published: Published, version: str, tmp_path: Path
) -> None:
    number = 3 if version == "latest" else int(version)
    record = stitch.ok("checkout", version, "--out", tmp_path / "out", *published.args)
    assert record["version"] == number
    assert words_of(tmp_path / "out") == words_of(published.chain[number])
    assert (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_transformers_loads_what_checkout_wrote(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    stitch.ok("checkout", "latest", "--out", tmp_path / "out", *published.args)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.num_parameters() > 0
    assert tokenizer("1 + 1")["input_ids"]


def test_an_anchor_stands_in_for_a_base_that_is_gone(stitch: Program, tmp_path: Path) -> None:
    chain = make_chain(tmp_path / "chain", num_steps=3)
    board = ("--board", tmp_path / "board")
    stitch.ok("publish", chain[1], *board, "--run", "math", "--base", chain[0])
    stitch.ok("publish", chain[2], *board)
    assert stitch.ok("anchor", "1", *board)["version"] == 1
    stitch.ok("publish", chain[3], *board)
    assert [row["anchor"] for row in stitch.ok("log", *board)["versions"]] == [
        False,
        False,
        True,
        False,
    ]
    moved = tmp_path / "moved"
    chain[0].rename(moved)
    stitch.ok("checkout", "3", "--out", tmp_path / "out", *board)
    assert words_of(tmp_path / "out") == words_of(chain[3])
    line = stitch.fails(2, "checkout", "0", "--out", tmp_path / "zero", *board)
    assert "give --base DIR" in line
    stitch.ok("checkout", "0", "--out", tmp_path / "zero", "--base", moved, *board)
    assert words_of(tmp_path / "zero") == words_of(moved)


def test_anchoring_twice_keeps_the_first(stitch: Program, published: Published) -> None:
    first = stitch.ok("anchor", "latest", *published.args)
    assert stitch.ok("anchor", "3", *published.args) == first
    assert stitch.ok("show", "3", *published.args)["anchor"]["digest"] == first["digest"]


def test_checkout_refuses_a_base_that_is_another_one(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    line = stitch.fails(
        2, "checkout", "2", "--out", tmp_path / "o", "--base", published.chain[1], *published.args
    )
    assert "not the base of run 'math'" in line
    assert not (tmp_path / "o").exists()


def test_checkout_does_not_write_over_a_full_directory(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(published.chain[0], out)
    assert "not empty" in stitch.fails(2, "checkout", "2", "--out", out, *published.args)
    stitch.ok("checkout", "2", "--out", out, "--overwrite", *published.args)
    assert words_of(out) == words_of(published.chain[2])


def test_a_damaged_patch_on_the_board_ends_in_an_error_not_in_weights(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    (blob,) = (published.board / "math" / "v" / "00000002").glob("*.patch")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    outcome = stitch("checkout", "3", "--out", tmp_path / "out", *published.args)
    assert outcome.code == exits.RETRYABLE
    assert "00000002" in outcome.err
    assert not (tmp_path / "out").exists()
    stitch.ok("checkout", "1", "--out", tmp_path / "one", *published.args)


def test_verify_proves_a_checkpoint_and_names_the_version_it_really_is(
    stitch: Program, published: Published
) -> None:
    assert stitch.ok("verify", published.chain[3], *published.args)["equal"]
    assert stitch.ok("verify", published.chain[1], "--version", 1, *published.args)["equal"]
    outcome = stitch("verify", published.chain[1], *published.args, "--json")
    assert outcome.code == exits.UNEQUAL
    assert outcome.json["found_version"] == 1
    assert outcome.json["expected"] != outcome.json["found"]
    text = stitch("verify", published.chain[0], "--version", 2, *published.args)
    assert text.code == exits.UNEQUAL
    assert "which is version 0" in text.out


def test_verify_finds_a_single_altered_bit(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    altered = tmp_path / "altered"
    shutil.copytree(published.chain[3], altered)
    with (altered / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        byte = file.read(1)
        file.seek(-2, 2)
        file.write(bytes([byte[0] ^ 1]))
    outcome = stitch("verify", altered, *published.args)
    assert outcome.code == exits.UNEQUAL
    assert "no recent version's" in outcome.out


def test_verify_lists_tensors_that_are_not_the_runs(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "other", layers=1)
    outcome = stitch("verify", other, *published.args)
    assert outcome.code == exits.UNEQUAL
    assert "only in the first: model.layers.1" in outcome.out


def test_verify_wants_one_thing_to_verify(stitch: Program, published: Published) -> None:
    assert "either a CHECKPOINT" in stitch.fails(2, "verify", *published.args)
    assert "lists no replica" in stitch.fails(2, "verify", "--replicas", *published.args)


def test_a_wide_trainer_checkpoint_is_verified_through_the_view(
    stitch: Program, tmp_path: Path
) -> None:
    chain = make_chain(tmp_path / "wide", num_steps=1, dtype="F32")
    board = ("--board", tmp_path / "board")
    stitch.ok("publish", chain[1], *board, "--run", "wide", "--base", chain[0])
    assert stitch.ok("verify", chain[1], *board)["equal"]
    other = tiny_checkpoint(tmp_path / "other", seed=1, dtype="F32")
    assert stitch("verify", other, *board).code == exits.UNEQUAL


def test_an_unknown_run_gets_the_near_name(stitch: Program, published: Published) -> None:
    assert "math" in stitch.fails(2, "log", *published.args, "--run", "mat")


def test_a_base_that_was_overwritten_is_noticed_and_an_anchor_used_instead(
    stitch: Program, tmp_path: Path
) -> None:
    chain = make_chain(tmp_path / "chain", num_steps=2)
    board = ("--board", tmp_path / "board")
    stitch.ok("publish", chain[1], *board, "--run", "math", "--base", chain[0], "--anchor")
    stitch.ok("publish", chain[2], *board)
    shutil.copy(chain[2] / "model.safetensors", chain[0] / "model.safetensors")
    outcome = stitch("checkout", "latest", "--out", tmp_path / "out", *board)
    assert outcome.code == 0, outcome.err
    assert "is not used as the base" in outcome.err
    assert words_of(tmp_path / "out") == words_of(chain[2])
