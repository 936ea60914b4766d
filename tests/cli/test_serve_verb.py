"""`stitch serve` and `stitch demo`: what their flags mean."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_kit import Program

import stitch.replica.run
from stitch.cli import exits
from stitch.replica.config import ReplicaConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ReplicaConfig]:
    """The configurations that `stitch serve` came up with, instead of running replicas."""
    configs: list[ReplicaConfig] = []

    def serve(config: ReplicaConfig, *, on_listening: Any) -> None:
        configs.append(config)
        app = SimpleNamespace(status=SimpleNamespace(replica="a"), url="http://127.0.0.1:7")
        on_listening(app, 7)

    monkeypatch.setattr(stitch.replica.run, "serve", serve)
    return configs


def test_flags_environment_and_file_make_the_configuration(
    stitch: Program, served: list[ReplicaConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stitch.toml"
    file.write_text('board = "b"\n[serve]\nmodel = "m"\nport = 1\nmax_lag = 3\nregion = "r"\n')
    monkeypatch.setenv("STITCH_SERVE_PORT", "2")
    monkeypatch.setenv("STITCH_SERVE_MAX_LAG", "4")
    outcome = stitch("serve", "--config", file, "--max-lag", "-1", "--id", "a", "--run", "math")
    assert outcome.code == 0, outcome.err
    config = served[0]
    assert (config.board, config.run, config.model) == ("b", "math", Path("m"))
    assert (config.port, config.max_lag, config.region) == (2, -1, "r")
    assert config.replica_id == "a"
    assert outcome.out == "replica a listens at http://127.0.0.1:7\n"
    announced = stitch.ok("serve", "--config", file)
    assert (announced["replica"], announced["port"]) == ("a", 7)


def test_an_engine_address_means_to_attach_with_a_token_from_a_file(
    stitch: Program, served: list[ReplicaConfig], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    arguments = ["--board", "b", "--model", "m", "--engine-url", "http://127.0.0.1:1"]
    assert "needs engine_url and engine_token" in stitch.fails(2, "serve", *arguments)
    assert stitch("serve", *arguments, "--engine-token-file", token).code == 0
    assert (served[0].engine, served[0].engine_token) == ("attach", "secret")
    token.write_text("\n")
    line = stitch.fails(2, "serve", *arguments, "--engine-token-file", token)
    assert "holds no token" in line


def test_what_follows_two_dashes_is_the_engines(
    stitch: Program, served: list[ReplicaConfig]
) -> None:
    own = ["--board", "b", "--model", "m", "--engine", "vllm", "--engine-python", "/e/bin/python"]
    assert stitch("serve", *own, "--", "--max-model-len", "512", "--x={1, 2}").code == 0
    (config,) = served
    assert (config.engine, config.engine_python) == ("vllm", Path("/e/bin/python"))
    assert config.engine_args == ("--max-model-len", "512", "--x={1, 2}")


ATTACH = ["--board", "b", "--model", "m", "--engine-url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m"], "no board is given"),
        (["--board", "b"], "model is not set: give --model"),
        (["--board", "b", "--model", "m", "--port", "x"], "port must be a whole number"),
        (
            ["--board", "b", "--model", "m", "--engine", "other"],
            "one of embedded, vllm, sglang, attach",
        ),
        ([*ATTACH, "--", "--dtype", "x"], "takes no arguments"),
        (["--board", "b", "--model", "m", "--admin-token", "x"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_named(
    stitch: Program,
    served: list[ReplicaConfig],
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STITCH_SERVE_ENGINE_TOKEN", "secret")
    assert words in stitch.fails(exits.USAGE, "serve", *arguments)
    assert served == []


def test_demo_hands_its_flags_on(
    stitch: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def run_demo(settings: Any) -> int:
        seen.append(settings)
        return exits.UNEQUAL

    monkeypatch.setattr("stitch.demo.supervise.run_demo", run_demo)
    outcome = stitch("demo", "--tiny", "--steps", 9, "--work", tmp_path, "--out", tmp_path / "r")
    assert outcome.code == exits.UNEQUAL
    (settings,) = seen
    assert (settings.tiny, settings.steps, settings.model) == (True, 9, None)
    assert (settings.work, settings.report) == (tmp_path, tmp_path / "r")
