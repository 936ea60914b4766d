"""Requests to an SGLang over commits, and what the answers say of versions."""

from __future__ import annotations

from typing import Any, ClassVar

from real_kit import RealSglang
from requests_suite import PROMPT, OnOneEngine


class TestRequests(OnOneEngine):
    engine = RealSglang
    twice: ClassVar[dict[str, Any]] = {"n": 2}
    own_routes: ClassVar[dict[str, Any]] = {
        "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}
    }


UNUSUAL = ("--disable-overlap-schedule", "--sleep-on-idle")


class TestOverlappedRequests(TestRequests):
    """With the usual loop, which prepares a step while the one before runs, and never rests."""

    class engine(RealSglang):
        args = tuple(arg for arg in RealSglang.args if arg not in UNUSUAL)
