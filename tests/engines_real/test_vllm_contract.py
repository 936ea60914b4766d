"""The engine contract on vllm: tied and untied, a mixture of experts, one and two ranks."""

from __future__ import annotations

from contract_suite import OnRealEngine
from real_kit import RealVllm


class TestTiedOnOneRank(OnRealEngine):
    engine, kind, tp = RealVllm, "tied", 1


class TestUntiedOnTwoRanks(OnRealEngine):
    engine, kind, tp = RealVllm, "untied", 2


class TestExpertsOnOneRank(OnRealEngine):
    engine, kind, tp = RealVllm, "moe", 1


class TestExpertsOnTwoRanks(OnRealEngine):
    engine, kind, tp = RealVllm, "moe", 2
