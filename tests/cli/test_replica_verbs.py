"""status and verify of replicas, with heartbeats on a real board and a scripted HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_kit import Program, Published

from stitch.board import open_board
from stitch.cli import exits
from stitch.cli.status import Pulse
from stitch.records import Heartbeat
from stitch.types import ReplicaState


def beat_of(replica: str, url: str, *, applied: int | None, seq: int = 1) -> Heartbeat:
    ready = applied is not None
    return Heartbeat(
        replica=replica,
        run="math",
        url=url,
        region="here",
        state=ReplicaState.SERVING if ready else ReplicaState.ERROR,
        applied=applied,
        newest_seen=3,
        ready=ready,
        reason="" if ready else "the engine is gone",
        last_error="" if ready else "EngineUnreachableError: no answer",
        boot="b1",
        seq=seq,
        sent_unix_s=1.0,
    )


class FakeReplica:
    """Answers POST /verify with what the test sets."""

    def __init__(self) -> None:
        self.reply: dict[str, object] = {}
        self.status = 200
        self.tokens: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.tokens.append(self.headers.get("Authorization"))
                data = json.dumps(fake.reply).encode()
                self.send_response(fake.status if self.path == "/verify" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def replica() -> Iterator[FakeReplica]:
    fake = FakeReplica()
    yield fake
    fake.close()


def digest(stitch: Program, published: Published, version: int) -> str:
    record = stitch.ok("show", version, *published.args)
    return str(record["digest_after"])


def list_replica(published: Published, *beats: Heartbeat) -> None:
    run = open_board(published.board).open_run("math")
    for beat in beats:
        run.put_heartbeat(beat)


def test_status_shows_versions_replicas_and_lag(stitch: Program, published: Published) -> None:
    list_replica(
        published,
        beat_of("a", "http://127.0.0.1:1", applied=3),
        beat_of("b", "http://127.0.0.1:2", applied=1),
        beat_of("c", "http://127.0.0.1:3", applied=None),
    )
    record = stitch.ok("status", *published.args)
    assert (record["run"], record["newest"], record["step"], record["current"]) == (
        "math",
        3,
        30,
        True,
    )
    assert [row["lag"] for row in record["replicas"]] == [0, 2, None]
    assert [row["ready"] for row in record["replicas"]] == [True, True, False]
    text = stitch("status", *published.args).out
    assert "newest   version 3" in text
    assert "EngineUnreachableError: no answer" in text


def test_status_of_a_board_without_replicas_says_so(stitch: Program, published: Published) -> None:
    assert "no replicas" in stitch("status", *published.args).out


def test_watching_and_json_exclude_each_other(stitch: Program, published: Published) -> None:
    outcome = stitch("status", "--watch", "--json", *published.args)
    assert outcome.code == exits.USAGE
    assert "above zero" in stitch.fails(2, "status", "--watch", "0", *published.args)


def test_watching_marks_a_heartbeat_that_stands_still() -> None:
    pulse = Pulse()
    still, moving = beat_of("a", "u", applied=1), beat_of("b", "u", applied=1)
    assert pulse.still_s([still, moving], 100.0) == {"a": 0.0, "b": 0.0}
    moved = beat_of("b", "u", applied=1, seq=2)
    assert pulse.still_s([still, moved], 130.0) == {"a": 30.0, "b": 0.0}


def test_replicas_whose_engines_hold_the_version_are_equal(
    stitch: Program, published: Published, replica: FakeReplica, tmp_path: Path
) -> None:
    list_replica(published, beat_of("a", replica.url, applied=3))
    replica.reply = {"run": "math", "version": 3, "digest": digest(stitch, published, 3)}
    token = tmp_path / "token"
    token.write_text("secret\n")
    record = stitch.ok("verify", "--replicas", "--admin-token-file", token, *published.args)
    assert record["equal"]
    assert record["replicas"][0]["version"] == 3
    assert replica.tokens == ["Bearer secret"]
    assert stitch.ok("verify", "--replica", replica.url + "/", *published.args)["equal"]


def test_a_replica_with_other_weights_is_unequal_whatever_it_says_of_itself(
    stitch: Program, published: Published, replica: FakeReplica
) -> None:
    wrong = digest(stitch, published, 2)
    replica.reply = {
        "run": "math",
        "version": 3,
        "digest": wrong,
        "board_digest": wrong,
        "equal": True,
    }
    outcome = stitch("verify", "--replica", replica.url, *published.args)
    assert outcome.code == exits.UNEQUAL
    assert "UNEQUAL" in outcome.out
    assert wrong in outcome.out


def test_a_replica_that_does_not_answer_is_no_proof(
    stitch: Program, published: Published, replica: FakeReplica
) -> None:
    replica.status = 503
    replica.reply = {"error": {"type": "EngineError", "message": "nothing is served yet"}}
    outcome = stitch("verify", "--replica", replica.url, *published.args)
    assert outcome.code == exits.RETRYABLE
    assert "nothing is served yet" in outcome.out
    list_replica(published, beat_of("gone", "http://127.0.0.1:1", applied=3))
    outcome = stitch("verify", "--replicas", *published.args, "--json")
    assert outcome.code == exits.RETRYABLE
    assert "does not answer" in outcome.json["replicas"][0]["error"]


def test_a_replica_of_another_run_is_named(
    stitch: Program, published: Published, replica: FakeReplica
) -> None:
    replica.reply = {"run": "other", "version": 3, "digest": "0" * 32}
    outcome = stitch("verify", "--replica", replica.url, *published.args)
    assert outcome.code == exits.USAGE
    assert "serves other@3" in outcome.out


def test_watching_shows_the_page_until_it_is_interrupted(
    stitch: Program, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = []

    class Pause:
        def wait(self, span_s: float) -> None:
            pages.append(span_s)
            if len(pages) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr("stitch.cli.status.threading", SimpleNamespace(Event=Pause))
    outcome = stitch("status", "--watch", "7", *published.args)
    assert outcome.code == exits.INTERRUPTED
    assert pages == [7.0] * 3
    assert outcome.out.count("no replicas") == 3
    assert outcome.err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("status", "reply", "words"),
    [
        (401, {}, "answered 401"),
        (302, {}, "answered 302"),
        (200, [], "did not answer with a JSON object"),
    ],
)
def test_odd_replies_are_usage_errors(
    stitch: Program,
    published: Published,
    replica: FakeReplica,
    status: int,
    reply: object,
    words: str,
) -> None:
    replica.status, replica.reply = status, reply  # type: ignore[assignment]
    outcome = stitch("verify", "--replica", replica.url, *published.args)
    assert outcome.code == exits.USAGE
    assert words in outcome.out
    outcome = stitch("verify", "--replica", "replica-7", *published.args)
    assert "is not an http(s) address" in outcome.out
