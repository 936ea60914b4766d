"""Who is let in, what is said to who is not, and that no secret is said to anybody."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from board_kit import new_run, publish
from store_kit import OpenBoard
from store_servers import ACCOUNT, BUCKET, Server

from stitch.board import Board, open_board
from stitch.board.stores.store import ObjectStore
from stitch.errors import StoreError, StoreUnsuitableError, UsageError
from stitch.testing.fault_proxy import FaultProxy

CANARY = "C4NARYx9QpZ7sWt3LkVb8NhRf2YdMc6JgT1aUe0X"
"""Twenty-odd random characters that no text holds by accident."""

STITCH = str(Path(sys.executable).with_name("stitch"))

SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY")

TELLTALES = ("Authorization:", "Signature=", "X-Amz-", "SharedKey", "sig=", "endpoint=", "?")
"""What stands beside secrets in requests, in obstore's own errors and in addresses."""


@contextmanager
def everything_said() -> Iterator[io.StringIO]:
    """All that any logger says, at any level."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(1)
    try:
        yield said
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def operations(store: ObjectStore, source: Path) -> list[Callable[[], object]]:
    return [
        lambda: store.get("math/run.json", max_bytes=100),
        lambda: store.get_range("math/run.json", 0, 10),
        lambda: store.head("math/run.json"),
        lambda: store.put("math/run.json", b"x", mode="create"),
        lambda: store.put("math/head.json", b"x", mode="overwrite"),
        lambda: store.put("math/big", source, mode="unique"),
        lambda: list(store.list_objects("math")),
        lambda: store.list_folders(""),
        lambda: store.delete("math/run.json"),
    ]


@pytest.mark.parametrize(
    "trouble", ["refused", "401", "403", "409", "429", "500", "503", "cut", "gone"]
)
def test_no_error_and_no_log_line_holds_a_secret(
    server: Server,
    open_on: OpenBoard,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trouble: str,
) -> None:
    source = tmp_path / "big"
    source.write_bytes(bytes(9 * 2**20))
    told: list[str] = []
    with FaultProxy(server.endpoint) as proxy, everything_said() as said:
        board = open_on(server, port=proxy.port, options="&timeout_s=5")
        for name in SECRET_VARIABLES:
            monkeypatch.setenv(name, CANARY)
        board = open_board(server.board_url("x", port=proxy.port))
        if trouble == "cut":
            proxy.lose_reply("", methods=("PUT", "POST", "DELETE", "GET", "HEAD"), times=None)
        elif trouble == "gone":
            proxy.drop(times=None)
        elif trouble != "refused":  # by the server, for the wrong secret
            proxy.answer(int(trouble), code=f"{CANARY}", times=None)
        for call in operations(board.store, source)[:: 1 if trouble == "refused" else 3]:
            try:
                call()
            except (StoreError, UsageError) as error:
                told += [str(error), repr(error), "".join(traceback.format_exception(error))]
    assert told
    secrets = (CANARY, *server.environment.values())
    errors = [text for text in told if "File " not in text]
    for text in [*told, said.getvalue(), repr(board), board.url]:
        for secret in secrets:
            assert secret not in text or secret in (ACCOUNT, "us-east-1")
    for text in errors:
        for telltale in TELLTALES:
            assert telltale not in text


def test_the_wrong_secret_is_named_as_such_and_not_tried_again(
    server: Server, open_on: OpenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(server.endpoint) as proxy:
        open_on(server)
        for name in SECRET_VARIABLES[0], SECRET_VARIABLES[2]:
            monkeypatch.setenv(name, CANARY)
        board = open_board(server.board_url("x", port=proxy.port))
        with pytest.raises(StoreUnsuitableError, match=r"credentials|secret|Permission"):
            board.store.get("math/run.json", max_bytes=100)
        assert proxy.num_requests == 1


def test_a_missing_bucket_is_not_an_empty_board(server: Server, open_on: OpenBoard) -> None:
    open_on(server)
    board = open_board(server.board_url("x").replace(f"/{BUCKET}/", "/no-such-bucket/").replace(
        f"s3://{BUCKET}", "s3://no-such-bucket"))  # fmt: skip
    with pytest.raises(StoreUnsuitableError, match="no such"):
        board.open_run("math")


def test_a_malformed_secret_is_not_quoted(
    azurite: Server, open_on: OpenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", CANARY + "!")
    with pytest.raises(StoreUnsuitableError, match="malformed") as raised:
        open_board(azurite.board_url("x"))
    assert CANARY not in "".join(traceback.format_exception(raised.value))


def test_a_clock_that_is_off_is_named(server: Server, open_on: OpenBoard) -> None:
    with FaultProxy(server.endpoint) as proxy:
        proxy.answer(403, code="RequestTimeTooSkewed", times=None)
        with pytest.raises(StoreUnsuitableError, match="clock is off"):
            open_on(server, port=proxy.port).runs()


def test_nobody_there_is_a_retryable_error(server: Server, open_on: OpenBoard) -> None:
    board = open_on(server, port=1)
    with pytest.raises(StoreError, match=r"Connection refused|connection failed"):
        board.store.get("math/run.json", max_bytes=100)


def test_credentials_come_from_a_profile_and_may_change_while_running(
    seaweedfs: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = seaweedfs.environment
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = wrong\naws_secret_access_key = {CANARY}\n"
        f"[trainer]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    url = seaweedfs.board_url(seaweedfs.fresh_prefix())
    with pytest.raises(StoreUnsuitableError):
        open_board(url).runs()
    assert open_board(f"{url}&profile=trainer").runs() == []
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    run = new_run(open_board(url))
    publish(run, 1)
    assert open_board(url).open_run("math").newest() == 1


def test_an_azure_connection_string_is_enough(
    azurite: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = azurite.environment["AZURE_STORAGE_ACCOUNT_KEY"]
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};"
        f"BlobEndpoint={azurite.endpoint}/{ACCOUNT};",
    )
    run = new_run(open_board(f"az://{ACCOUNT}/{BUCKET}/{azurite.fresh_prefix()}"))
    publish(run, 1)
    assert run.newest() == 1


def test_programs_take_such_addresses(board: Board, server: Server, open_on: OpenBoard) -> None:
    run = new_run(board)
    publish(run, 1)
    prefix = board.url.rsplit("/", 1)[-1]
    done = subprocess.run(
        [
            STITCH,
            "log",
            "--board",
            server.board_url(prefix),
            "--run",
            "math",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1" in done.stdout
