"""Faults in the ranks of a real SGLang."""

from __future__ import annotations

import os
from pathlib import Path

from faults import HERE
from faults_suite import WithFaults
from real_kit import RealSglang


def plugin(place: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """SGLang finds plugins among installed distributions; a folder on the path can be one."""
    info = place / "faulty-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 0\n")
    points = "[sglang.srt.plugins]\nfaulty = faulty_sglang:register\n"
    (info / "entry_points.txt").write_text(points)
    return (), {"PYTHONPATH": os.pathsep.join([str(place), str(HERE)])}


class TestFaults(WithFaults):
    engine = RealSglang
    plugin = staticmethod(plugin)
