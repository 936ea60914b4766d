"""What all tests share: no network look-ups, one thread a process, the real data if at hand."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)


# A shell starts background jobs with SIGINT ignored, and children would inherit that; tests that
# interrupt a program need it to be as it is in the foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, or its making, says something about the machine and nothing about us.
settings.register_profile(
    "stitch", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stitch")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real weight changes (`base.safetensors`, `adam1e6/step*.npz`); skips if absent."""
    given = os.environ.get("STITCH_REAL_DATA")
    place = Path(given) if given else Path(__file__).parents[2] / "shared" / "data" / "rl-smollm2"
    if not (place / "base.safetensors").exists():
        pytest.skip("the real weight changes are not at hand; set STITCH_REAL_DATA to their folder")
    return place
