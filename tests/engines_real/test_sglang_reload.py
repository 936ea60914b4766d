"""A stock SGLang, without our plugin."""

from __future__ import annotations

from real_kit import RealSglang
from reload_suite import OnStockEngine, ServedByReloads


class TestTiedOnOneRank(OnStockEngine):
    engine, kind, tp = RealSglang, "tied", 1


class TestUntiedOnTwoRanks(OnStockEngine):
    engine, kind, tp = RealSglang, "untied", 2


class TestExpertsOnTwoRanks(OnStockEngine):
    engine, kind, tp = RealSglang, "moe", 2


class TestServed(ServedByReloads):
    engine = RealSglang
