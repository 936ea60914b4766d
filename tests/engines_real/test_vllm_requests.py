"""Requests to a vLLM over commits."""

from __future__ import annotations

from real_kit import RealVllm
from requests_suite import OnOneEngine


class TestRequests(OnOneEngine):
    engine = RealVllm
