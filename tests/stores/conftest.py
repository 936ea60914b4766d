"""Real servers for the tests in this folder, which only `make test-stores` collects.

A server that is missing or does not start fails the tests that need it; none is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_servers
from store_kit import QUICK, OpenBoard
from store_servers import Server

from stitch.board import Board, open_board
from stitch.testing.fault_proxy import FaultProxy

sys.path.insert(0, str(Path(__file__).parents[1] / "board"))  # for board_kit
if "stitch.testing.store_contract" not in sys.modules:
    pytest.register_assert_rewrite("stitch.testing.store_contract")

collect_ignore_glob = [] if os.environ.get("STITCH_STORE_SERVERS") else ["test_*.py"]


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with store_servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with store_servers.azurite(tmp_path_factory.mktemp("azurite") / "data") as server:
        yield server


@pytest.fixture(params=["seaweedfs", "azurite"])
def server(request: pytest.FixtureRequest) -> Server:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the credentials or profiles of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def open_on(monkeypatch: pytest.MonkeyPatch, no_credentials: None) -> OpenBoard:
    def open_on(
        server: Server,
        prefix: str | None = None,
        *,
        port: int | None = None,
        options: str = "",
        unsigned: bool = False,
    ) -> Board:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        where = prefix or server.fresh_prefix()
        url = server.board_url(where, port=port, unsigned=unsigned) + options
        return open_board(url, patience=QUICK)

    return open_on


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def board(server: Server, open_on: OpenBoard) -> Board:
    """A fresh board on each server."""
    return open_on(server)
