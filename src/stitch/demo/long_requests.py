"""A long answer asked of each replica all the time, to see several versions inside one output."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stitch.types import VersionSpan

RETRY_S = 0.2
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class LongAnswer:
    """One finished answer: which of its tokens came from which version."""

    replica: str
    spans: tuple[VersionSpan, ...]

    @property
    def versions(self) -> list[int]:
        return sorted({span.version for span in self.spans})


class LongRequests:
    """One thread per replica that asks again `pause_s` seconds after an answer is complete.

    A request that its replica's death cuts off, or that comes before the replica is ready, is
    asked again there later and counts as retried. What the engine rejects counts as failed.
    """

    def __init__(
        self, url_of: Callable[[str], str | None], max_tokens: int, pause_s: float
    ) -> None:
        self._url_of = url_of
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[LongAnswer] = []
        self.errors: list[str] = []
        self.retried = 0

    def start(self, replica: str) -> None:
        """Keep asking `replica`, whose address `url_of` tells at every attempt."""
        thread = threading.Thread(
            target=self._ask_forever, args=(replica,), name=f"long-{replica}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Ask nothing more. What is under way ends when its replica does."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _ask_forever(self, replica: str) -> None:
        while not self._stop.is_set():
            url = self._url_of(replica)
            answered = url is not None and self._ask(replica, url)
            self._stop.wait(self._pause_s if answered else RETRY_S)

    def _ask(self, replica: str, url: str) -> bool:
        """Ask once; whether an answer came."""
        body = {
            "prompt": "Once upon a time",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        try:
            answer = post_json(f"{url}/v1/completions", body, TIMEOUT_S)
        except urllib.error.HTTPError as error:
            self._note(error.code, f"{replica}: HTTP {error.code}: {error.read()[:300]!r}")
            return False
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note(None, f"{replica}: {error!r}")
            return False
        rows = answer["choices"][0].get("weight_versions") or ()
        spans = tuple(VersionSpan(row["version"], row["start"], row["end"]) for row in rows)
        self.answers.append(LongAnswer(replica=replica, spans=spans))
        return True

    def _note(self, status: int | None, what: str) -> None:
        if self._stop.is_set():
            return
        if status is None or status in (409, 429, 502, 503, 504):
            self.retried += 1
        else:
            self.errors.append(what)


def post_json(url: str, body: object, timeout_s: float) -> dict[str, Any]:
    """POST JSON to a process of this machine and return the JSON answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
