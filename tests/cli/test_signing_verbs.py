"""`stitch keygen`, and the other verbs with keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import Program, make_chain

from stitch.config import load
from stitch.replica.config import ReplicaConfig


@pytest.fixture(scope="module")
def short_chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_chain(tmp_path_factory.mktemp("chain"), num_steps=2)


def test_signed_boards_from_the_command_line(
    stitch: Program, tmp_path: Path, short_chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stitch.ok("keygen", tmp_path / "k")
    other = stitch.ok("keygen", tmp_path / "o")
    assert made["key"] != other["key"]
    assert Path(made["private"]).stat().st_mode & 0o777 == 0o600
    stitch.fails(2, "keygen", tmp_path / "k")
    where = ["--board", tmp_path / "board", "--run", "m"]
    monkeypatch.setenv("STITCH_SIGNING_KEY", str(tmp_path / "k"))
    stitch.ok("publish", short_chain[1], "--base", short_chain[0], *where)
    monkeypatch.delenv("STITCH_SIGNING_KEY")
    trust = ["--trusted-keys", tmp_path / "k.pub"]
    assert stitch.ok("show", "1", *where, *trust)["signed_by"] == made["key"]
    assert stitch.ok("show", "1", *where)["signed_by"] == made["key"]
    assert stitch.ok("log", *where, *trust)["newest"] == 1
    assert stitch.ok("fsck", *where, *trust)["signers"] == [made["key"]]
    assert stitch.ok("fsck", *where)["signers"] is None
    both = f"{tmp_path / 'k.pub'},{tmp_path / 'o.pub'}"
    assert stitch.ok("log", *where, "--trusted-keys", both)["newest"] == 1
    for verb in ("log", "show", "fsck"):
        told = stitch.fails(2, verb, *where, "--trusted-keys", tmp_path / "o.pub")
        assert made["key"] in told
    stitch.ok("publish", short_chain[2], *where)  # unsigned
    assert stitch.ok("show", "2", *where)["signed_by"] is None
    assert stitch.ok("log", *where, *trust)["newest"] == 1
    assert "not signed" in stitch.fails(2, "show", "2", *where, *trust)
    checked = stitch("fsck", *where, *trust, "--json")
    assert checked.code == 1
    (damage,) = checked.json["damaged"]
    assert damage["key"] == "m/v/00000002/manifest.json"
    assert "not signed" in damage["problem"]


def test_a_key_that_others_can_read_is_refused(
    stitch: Program, tmp_path: Path, short_chain: list[Path]
) -> None:
    stitch.ok("keygen", tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    told = stitch.fails(
        2, "publish", short_chain[1], "--base", short_chain[0], "--board", tmp_path / "b",
        "--run", "m", "--signing-key", tmp_path / "k",
    )  # fmt: skip
    assert "mode 0644" in told
    for line in (tmp_path / "k").read_text().splitlines()[1:-1]:
        assert line not in told


@pytest.mark.parametrize("value", ["", "no-such-file.pub", ","])
def test_keys_that_are_named_but_not_there_are_never_left_out(
    stitch: Program, tmp_path: Path, value: str
) -> None:
    stitch.fails(2, "log", "--board", tmp_path, "--run", "m", "--trusted-keys", value)


def test_replicas_get_their_trusted_keys_from_the_environment(tmp_path: Path) -> None:
    config = load(
        ReplicaConfig,
        "serve",
        environment={"STITCH_SERVE_TRUSTED_KEYS": "a.pub, b.pub"},
        flags={"board": "b", "model": "m"},
    )
    assert config.trusted_keys == (Path("a.pub"), Path("b.pub"))
