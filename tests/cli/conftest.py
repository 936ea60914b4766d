"""The program, a chain of checkpoints, and a board that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import Program, Published, make_chain

from stitch.publish import Publisher
from stitch.tensors import open_checkpoint


@pytest.fixture
def stitch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    for name in ("STITCH_BOARD", "STITCH_RUN", "STITCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Program(capsys)


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoint directories step0 to step3."""
    return make_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def published(tmp_path: Path, chain: list[Path]) -> Published:
    """Run `math` with the chain as versions 0 to 3."""
    board = tmp_path / "board"
    with Publisher.start(board, "math", chain[0], threads=1) as publisher:
        for step, path in enumerate(chain[1:], start=1):
            with open_checkpoint(path) as checkpoint:
                publisher.publish(checkpoint, step=10 * step).wait()
    return Published(board, chain)
