"""Faults in the ranks of a real vLLM."""

from __future__ import annotations

from pathlib import Path

from faults import HERE
from faults_suite import WithFaults
from real_kit import RealVllm

FAULTY = ("--worker-extension-cls", "faulty_vllm.FaultyWorkerExtension")


def plugin(place: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    return FAULTY, {"PYTHONPATH": str(HERE)}


class TestFaults(WithFaults):
    engine = RealVllm
    plugin = staticmethod(plugin)
