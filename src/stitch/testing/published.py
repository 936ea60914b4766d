"""A small run on a board, every version of which is known, for tests of whatever reads versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stitch.board import Board, Patience, Run, open_board
from stitch.codec import DigestState
from stitch.publish import Publisher, RetryPolicy, write_anchor
from stitch.tensors import HostWeights, write_safetensors
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights

IMPATIENT = Patience(num_tries=2, first_wait_s=0.001, max_wait_s=0.001)
NO_RETRIES = RetryPolicy(max_attempts=1)
FEW_RETRIES = RetryPolicy(max_attempts=3, first_delay_s=0.001, max_delay_s=0.001)


def quick_board(where: str | Path) -> Board:
    """A board that hardly waits between tries."""
    return open_board(where, patience=IMPATIENT)


def copy_of(weights: HostWeights) -> HostWeights:
    return HostWeights.load(weights)


def digest_of(weights: HostWeights) -> str:
    return DigestState.of(weights, threads=1).version_digest()


@dataclass(kw_only=True)
class PublishedRun:
    """`weights[v]` is what version v holds."""

    board: Board
    run: Run
    base: Path
    weights: list[HostWeights]
    digests: list[str] = field(default_factory=list)

    def manifest_path(self, version: int) -> Path:
        """Of a board in a directory."""
        return self.folder(version) / "manifest.json"

    def blob_path(self, version: int) -> Path:
        """The only patch file of a version on a board in a directory."""
        (path,) = self.folder(version).glob("*.patch")
        return path

    def folder(self, version: int) -> Path:
        return Path(self.board.url.removeprefix("file://")) / self.run.name / f"v/{version:08d}"


def published_run(
    directory: Path,
    num_versions: int,
    *,
    board: Board | None = None,
    density: float = 0.02,
    anchors: tuple[int, ...] = (),
    hidden: int = 32,
    dtype: str = "BF16",
) -> PublishedRun:
    """Publish `num_versions` versions of synthetic weights as run "r", with `anchors` of some."""
    board = board or quick_board(directory / "board")
    weights = synthetic_weights(synthetic_schema(hidden=hidden, dtype=dtype))
    base = directory / "base.safetensors"
    write_safetensors(base, weights)
    history = [copy_of(weights)]
    with Publisher.start(board, "r", base, threads=1, retry=NO_RETRIES) as publisher:
        for version in range(1, num_versions + 1):
            adam_step(weights, density, seed=version)
            publisher.publish(weights, step=10 * version).wait()
            history.append(copy_of(weights))
    run = board.open_run("r")
    for version in anchors:
        write_anchor(run, history[version], version)
    return PublishedRun(
        board=board,
        run=run,
        base=base,
        weights=history,
        digests=[digest_of(each) for each in history],
    )
