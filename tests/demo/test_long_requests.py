"""Requests that are asked again and again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stitch.demo.long_requests import LongRequests

DONE = {"choices": [{"weight_versions": [{"version": 4, "start": 0, "end": 9}]}]}


class Replica(ThreadingHTTPServer):
    """Answers with the statuses of `script`, one a request, then with 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[int] = []
        self.served = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Replica

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.script.pop(0) if self.server.script else 200
        if status == 0:
            self.close_connection = True
            return
        body = json.dumps(DONE).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if status == 200:
            self.server.served.set()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def replica() -> Iterator[Replica]:
    server = Replica()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask_until_served(replica: Replica) -> LongRequests:
    requests = LongRequests(lambda name: replica.url, max_tokens=9, pause_s=0.01)
    requests.start("r1")
    assert replica.served.wait(20)
    requests.stop()
    requests.join(20)
    return requests


def test_the_versions_of_an_answer_are_kept(replica: Replica) -> None:
    requests = ask_until_served(replica)
    assert requests.answers[0].versions == [4]
    assert (requests.retried, requests.errors) == (0, [])


def test_not_ready_and_broken_connections_are_tried_again(replica: Replica) -> None:
    replica.script = [503, 0, 409, 200]
    requests = ask_until_served(replica)
    assert (requests.retried, requests.errors) == (3, [])


def test_a_rejected_request_is_an_error(replica: Replica) -> None:
    replica.script = [400, 200]
    requests = ask_until_served(replica)
    assert requests.retried == 0
    assert "r1: HTTP 400" in requests.errors[0]


def test_nothing_is_sent_to_a_replica_that_is_not_there() -> None:
    asked = threading.Event()

    def url_of(name: str) -> None:
        asked.set()

    requests = LongRequests(url_of, max_tokens=9, pause_s=0.01)
    requests.start("r3")
    assert asked.wait(20)
    requests.stop()
    requests.join(20)
    assert (requests.answers, requests.retried, requests.errors) == ([], 0, [])
