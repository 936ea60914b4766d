"""One board with fake replicas per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_fakes import LeapingClock, Site


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LeapingClock:
    """The clock that deadlines are held by."""
    clock = LeapingClock()
    monkeypatch.setattr("stitch.client.dispatch.time", clock)
    return clock
