from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("stitch.testing.engine_contract")

from stitch.testing.tiny import tiny_checkpoint  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BF16 llama with tied embeddings."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny F32 llama without tied embeddings."""
    directory = tmp_path_factory.mktemp("models") / "tiny-f32"
    return tiny_checkpoint(directory, dtype="F32", tied=False, seed=3)
