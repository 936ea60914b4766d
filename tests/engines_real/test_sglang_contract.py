"""The engine contract on sglang: tied and untied, a mixture of experts, one and two ranks."""

from __future__ import annotations

from contract_suite import OnRealEngine
from real_kit import RealSglang


class TestTiedOnOneRank(OnRealEngine):
    engine, kind, tp = RealSglang, "tied", 1


class TestUntiedOnTwoRanks(OnRealEngine):
    engine, kind, tp = RealSglang, "untied", 2


class TestExpertsOnOneRank(OnRealEngine):
    engine, kind, tp = RealSglang, "moe", 1


class TestExpertsOnTwoRanks(OnRealEngine):
    engine, kind, tp = RealSglang, "moe", 2
