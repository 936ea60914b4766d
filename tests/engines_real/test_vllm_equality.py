"""A patched vllm against a fresh one; requests over commits."""

from __future__ import annotations

from equality_suite import OnEngine, OnOneEngine
from real_kit import RealVllm


class TestTokens(OnEngine):
    engine = RealVllm


class TestRequests(OnOneEngine):
    engine = RealVllm
