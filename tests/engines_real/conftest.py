"""Tests on real engines: those of vLLM run where STITCH_VLLM_PYTHON names an interpreter with it,
those of SGLang where STITCH_SGLANG_PYTHON does.

Each of them is an environment of its own with the engine and this package. Starting one takes half
a minute, so tests share a running engine where they can.
"""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite(
    "stitch.testing.engine_contract",
    "real_kit",
    "contract_suite",
    "equality",
    "requests_suite",
    "faults_suite",
    "serve_suite",
    "reload_suite",
)

collect_ignore_glob = [
    f"test_{name}_*.py"
    for name in ("vllm", "sglang")
    if not os.environ.get(f"STITCH_{name.upper()}_PYTHON")
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting an engine counts against the test that needs it first."""
    for item in items:
        if "engines_real" in item.nodeid and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
