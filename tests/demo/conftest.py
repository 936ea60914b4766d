"""The tiny model, and a client that samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo_fakes import SamplingClient

from stitch.demo.master import load_model
from stitch.demo.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the demo's tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny(tiny_dir: Path) -> tuple[Any, Any]:
    """A fresh FP32 copy of the tiny model, and its tokenizer."""
    return load_model(tiny_dir)


@pytest.fixture
def sampling_client(tiny: tuple[Any, Any]) -> SamplingClient:
    return SamplingClient(*tiny)
