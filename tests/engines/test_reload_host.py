"""What a replica does to get a stock engine: attach to one, or start one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Served
from reload_kit import ToyEngine, digest_of, load, sglang_app, small_model, vllm_app

from stitch.board import Run, open_board
from stitch.errors import FatalReplicaError, UsageError
from stitch.publish import Publisher
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import host_for
from stitch.replica.reload_host import ReloadHost
from stitch.types import VersionRef

APPS: dict[str, Any] = {"vllm": vllm_app, "sglang": sglang_app}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    model = small_model(tmp_path / "model")
    with Publisher.start(open_board(tmp_path / "board"), "r", model, threads=1):
        yield open_board(tmp_path / "board").open_run("r")


def config_of(place: Path, **more: Any) -> ReplicaConfig:
    usual = {"board": str(place / "board"), "model": place / "model", "engine_mode": "reload"}
    return ReplicaConfig(**{**usual, "engine_dir": place / "engine", **more})


@pytest.mark.parametrize("engine", APPS)
async def test_it_attaches_to_a_running_engine_and_gives_it_back(
    engine: str, run: Run, tmp_path: Path
) -> None:
    toy = ToyEngine(tmp_path / "model")
    async with Served(APPS[engine](toy)) as url:
        for _ in range(2):  # the directory is free again
            host = host_for(config_of(tmp_path, engine=engine, engine_url=url))
            assert isinstance(host, ReloadHost)
            await host.begin()
            port = await host.ready(run)
            await port.bind(VersionRef("r", 0), digest_of(load(tmp_path / "model")))
            assert (await port.describe()).ref == VersionRef("r", 0)
            await port.close()
            await host.stop()
    assert toy.label == "r@0"
    assert not toy.paused


async def test_an_engine_that_never_answers_is_given_up(run: Run, tmp_path: Path) -> None:
    config = config_of(
        tmp_path, engine="vllm", engine_url="http://127.0.0.1:9", engine_start_timeout_s=0.1
    )
    with pytest.raises(FatalReplicaError, match="no stock engine answered"):
        await host_for(config).ready(run)


async def test_an_engine_that_does_not_start_is_said(run: Run, tmp_path: Path) -> None:
    """This environment has no vLLM."""
    host = host_for(config_of(tmp_path, engine="vllm", engine_python=Path(sys.executable)))
    with pytest.raises(FatalReplicaError, match="No module named 'vllm'"):
        await host.ready(run)
    await host.stop()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": "embedded"}, "stock engines"),
        ({"engine": "vllm", "engine_dir": None}, "engine_dir"),
        (
            {"engine": "vllm", "engine_url": "http://127.0.0.1:9", "engine_mode": "plugin"},
            "one of them",
        ),
    ],
)
def test_settings_that_do_not_fit_are_said(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        config_of(tmp_path, **given)
