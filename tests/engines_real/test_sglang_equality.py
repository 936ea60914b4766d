"""A patched sglang against a fresh one; requests over commits."""

from __future__ import annotations

from equality_suite import OnEngine, OnOneEngine
from real_kit import RealSglang


class TestTokens(OnEngine):
    engine = RealSglang


class TestRequests(OnOneEngine):
    engine = RealSglang
