"""A replica around sglang."""

from __future__ import annotations

from real_kit import RealSglang
from serve_suite import Served


class TestServed(Served):
    engine = RealSglang
