"""Tests on real engines: they run where STITCH_VLLM_PYTHON names the interpreter of one.

Each of them is an environment of its own with the engine and this package. Starting one takes half
a minute, so tests share a running engine where they can.
"""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("stitch.testing.engine_contract", "real_kit")

collect_ignore_glob = [] if os.environ.get("STITCH_VLLM_PYTHON") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting an engine counts against the test that needs it first."""
    for item in items:
        if "engines_real" in item.nodeid and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
