"""One board with fake replicas per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_fakes import Site


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()
