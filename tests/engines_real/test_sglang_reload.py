"""A stock SGLang, without our plugin."""

from __future__ import annotations

from real_kit import RealSglang
from reload_suite import Contract, Reloads, ServedByReloads


class TestContractOnOneRank(Contract):
    engine, kind, tp = RealSglang, "untied", 1


class TestContractOnTwoRanks(Contract):
    engine, kind, tp = RealSglang, "untied", 2


class TestReloads(Reloads):
    engine = RealSglang
    kinds = (("tied", 1), ("untied", 2), ("moe", 2))


class TestServed(ServedByReloads):
    engine = RealSglang
