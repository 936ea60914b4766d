"""A replica's settings: defaults and refusals."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from stitch.engines.launch import embedded_command
from stitch.errors import UsageError
from stitch.replica.config import ReplicaConfig


def test_the_embedded_engine_is_started_with_its_own_defaults() -> None:
    """A replica that is told nothing must not slow the engine down by choosing for it."""
    config = ReplicaConfig(board="board", model=Path("model"))
    engine = inspect.signature(embedded_command).parameters
    for name in ("dtype", "device", "max_slots", "max_len", "threads"):
        assert getattr(config, name) == engine[name].default


@pytest.mark.parametrize("url", ["", "replica:8000", "ftp://replica", "http://u:p@replica:8000"])
def test_an_address_that_no_heartbeat_could_carry_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(UsageError, match="url must be a plain http"):
        ReplicaConfig(board="b", model=Path("m"), url=url)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_everywhere_needs_an_address_for_clients(host: str) -> None:
    with pytest.raises(UsageError, match="give `--url`"):
        ReplicaConfig(board="b", model=Path("m"), host=host)
    config = ReplicaConfig(board="b", model=Path("m"), host=host, url="http://gpu-7:8000")
    assert config.url_at(8000) == "http://gpu-7:8000"
