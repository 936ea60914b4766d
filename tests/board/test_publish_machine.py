"""Random sequences of publishing, crashing, resuming and reading, on stores without servers."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from publish_machine import machine_on

from stitch.board.stores.directory import open_directory
from stitch.board.stores.store import ObjectStore, memory_store


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_whatever_fails_and_crashes_the_log_is_right(kind: str, tmp_path: Path) -> None:
    def fresh() -> ObjectStore:
        name = secrets.token_hex(8)
        if kind == "memory":
            return memory_store(name)
        return open_directory(tmp_path / name, create=True)

    run_state_machine_as_test(
        machine_on(fresh), settings=settings(max_examples=10, stateful_step_count=25)
    )
