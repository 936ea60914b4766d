from __future__ import annotations

from pathlib import Path

import pytest

from stitch.testing.published import PublishedRun, published_run


@pytest.fixture
def published(tmp_path: Path) -> PublishedRun:
    """A run of three versions on a board in a directory."""
    return published_run(tmp_path, 3)
