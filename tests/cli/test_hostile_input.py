"""The program against odd terminals, odd arguments and what strangers wrote on the board."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cli_kit import Program, Published
from test_replica_verbs import beat_of

from stitch.board import open_board
from stitch.cli import exits, text
from stitch.records import Heartbeat
from stitch.types import is_http_address

DEADLINE_S = 60


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(published: Published, closed: str) -> None:
    command = f'exec "$0" -m stitch.cli log --board "$1" {closed}'
    arguments = ["sh", "-c", command, sys.executable, str(published.board)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (exits.OK, "")


def test_text_that_the_terminal_cannot_show_is_escaped(published: Published) -> None:
    arguments = [sys.executable, "-m", "stitch.cli", "log", "--board", str(published.board)]
    arguments += ["--run", "m\N{LATIN SMALL LETTER E WITH ACUTE}"]
    environment = {"PYTHONIOENCODING": "ascii:strict", "PATH": ""}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=DEADLINE_S, env=environment
    )
    assert done.returncode == exits.USAGE
    assert "Traceback" not in done.stderr
    assert "m\\xe9" in done.stderr


def hostile_beat() -> Heartbeat:
    return replace(
        beat_of("r1", "http://127.0.0.1:1", applied=3),
        last_error="a\nb\x1b]0;title\x07\ud800",
        region="\u202e",
        sent_unix_s=1e300,
    )


def test_a_replica_cannot_steer_the_terminal_of_who_looks(
    stitch: Program, published: Published
) -> None:
    open_board(published.board).open_run("math").put_heartbeat(hostile_beat())
    outcome = stitch("status", *published.args)
    assert outcome.code == exits.OK
    assert outcome.out.replace("\n", "").isprintable()
    assert "a\\nb\\x1b]0;title\\x07\\ud800" in outcome.out
    assert stitch.ok("status", *published.args)["replicas"][0]["region"] == "\u202e"


def test_a_time_that_no_calendar_has_is_shown_as_a_number() -> None:
    assert text.utc(1e300) == "1e+300 s"
    assert text.utc(0.0) == "1970-01-01 00:00:00"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300", "soon"])
@pytest.mark.parametrize("call", [("status", "--watch"), ("verify", "--replicas", "--timeout-s")])
def test_a_time_that_cannot_be_waited_is_refused(
    stitch: Program, published: Published, call: tuple[str, ...], seconds: str
) -> None:
    stitch.fails(exits.USAGE, *published.args, *call, seconds)


@pytest.mark.parametrize("version", ["9" * 5000, "-1", "1.5", "", "100000000"])
def test_a_version_that_is_no_number_is_refused(
    stitch: Program, published: Published, version: str
) -> None:
    line = stitch.fails(exits.USAGE, "show", *published.args, "--", version)
    assert "defect" not in line
    assert len(line) < 300


def test_two_dashes_end_the_flags(stitch: Program, published: Published) -> None:
    assert stitch("show", *published.args, "--", "2").code == exits.OK
    assert "junk" in stitch.fails(exits.USAGE, "log", *published.args, "--", "junk")


ADDRESSES = [
    "javascript:alert(1)",
    "file:///etc/passwd",
    "http://",
    "//x",
    "http://[bad",
    "http://127.0.0.1:99999999",
    "http://127.0.0.1:-1",
    "http://127.0.0.1:0",
    "http://127.0.0.1:abc",
    "http://user:secret@127.0.0.1:1",
    "http://127.0.0.1\r\nX: y",
    "http://x\0",
    "http://x y",
    "http://x?q=1",
    "http://x/#f",
    "http://" + "a" * 300,
    "http://" + "a" * 60_000 + "!",
    "http://\N{LATIN SMALL LETTER E WITH ACUTE}.example",
    "http://\ud800",
]


@pytest.mark.parametrize("address", ADDRESSES, ids=ascii)
def test_an_address_that_is_no_plain_one_is_refused(
    stitch: Program, published: Published, address: str
) -> None:
    assert not is_http_address(address)
    outcome = stitch("verify", "--replica", address, *published.args, "--json")
    assert outcome.code == exits.USAGE
    assert "is not an http(s) address" in outcome.json["replicas"][0]["error"]


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:8000",
        "https://replica_1.example.com",
        "http://[::1]:80/a/b",
        "http://localhost./",
    ],
)
def test_plain_addresses_are_accepted(address: str) -> None:
    assert is_http_address(address)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "answer",
    [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + DEEP],
    ids=["no HTTP", "deep JSON"],
)
def test_a_replica_that_answers_nonsense_does_not_hide_the_others(
    stitch: Program, published: Published, answer: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        outcome = stitch("verify", "--replica", url, *published.args, "--json")
        thread.join(DEADLINE_S)
    assert outcome.code in (exits.USAGE, exits.RETRYABLE)
    assert outcome.json["replicas"][0]["replica"] == url


def test_every_flipped_byte_of_a_patch_is_refused_and_nothing_is_written(
    stitch: Program, chain: list[Path], tmp_path: Path
) -> None:
    patch, out = tmp_path / "p.patch", tmp_path / "out.safetensors"
    stitch.ok("diff", chain[0], chain[1], "--out", patch)
    good = patch.read_bytes()
    for at in [*range(0, 40), *range(40, len(good), max(1, len(good) // 20))]:
        patch.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        outcome = stitch("apply", chain[0], patch, "--out", out, "--json", "--threads", "1")
        assert outcome.code == exits.USAGE
        assert str(patch) in json.loads(outcome.out)["error"]["message"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p.patch"]


def test_checkout_without_the_base_takes_another_anchor_when_one_is_damaged(
    stitch: Program, published: Published, tmp_path: Path
) -> None:
    board = ("--board", published.board)
    for version in (1, 2):
        stitch.ok("anchor", version, *board)
    (file,) = (published.board / "math/v/00000002").glob("anchor-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    record = published.board / "math" / "run.json"
    fields = json.loads(record.read_bytes())
    record.write_text(json.dumps({**fields, "base": str(tmp_path / "gone")}))
    outcome = stitch("checkout", "3", *board, "--out", tmp_path / "out", "--json")
    assert outcome.code == exits.OK
    assert "note: anchor 2 is not used" in outcome.err
    (other,) = (published.board / "math/v/00000001").glob("anchor-*.safetensors")
    other.unlink()
    stitch_error = stitch("checkout", "3", *board, "--out", tmp_path / "none", "--json")
    assert stitch_error.code == exits.RETRYABLE
    assert "anchor-" in stitch_error.json["error"]["message"]
