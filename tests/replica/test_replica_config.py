"""Defaults of a replica's settings."""

from __future__ import annotations

import inspect
from pathlib import Path

from stitch.engines.launch import embedded_command
from stitch.replica.config import ReplicaConfig


def test_the_embedded_engine_is_started_with_its_own_defaults() -> None:
    """A replica that is told nothing must not slow the engine down by choosing for it."""
    config = ReplicaConfig(board="board", model=Path("model"))
    engine = inspect.signature(embedded_command).parameters
    for name in ("dtype", "device", "max_slots", "max_len", "threads"):
        assert getattr(config, name) == engine[name].default
