"""A replica around vllm."""

from __future__ import annotations

from real_kit import RealVllm
from serve_suite import Served


class TestServed(Served):
    engine = RealVllm
