"""Random sequences of publishing, crashing, resuming and reading, on servers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from publish_machine import machine_on
from store_kit import OpenBoard
from store_servers import Server

from stitch.board.stores.store import ObjectStore


@pytest.mark.timeout(600)
def test_whatever_fails_and_crashes_the_log_is_right(server: Server, open_on: OpenBoard) -> None:
    def fresh() -> ObjectStore:
        return open_on(server).store

    run_state_machine_as_test(
        machine_on(fresh), settings=settings(max_examples=8, stateful_step_count=25)
    )
