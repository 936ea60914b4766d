"""A trainer in a process of its own, for tests that kill it: BOARD BASE NUM_VERSIONS.

Opens run "r" and publishes the synthetic weights of each version that the board lacks, saying
`published N` once it was told that version N exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stitch.publish import Publisher
from stitch.tensors import HostWeights
from stitch.testing.published import NO_RETRIES, quick_board
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights

DENSITY = 0.02


def trained(version: int) -> HostWeights:
    """What the trainer holds when it publishes `version`: the same in every process."""
    weights = synthetic_weights(synthetic_schema(hidden=16))
    for step in range(1, version + 1):
        adam_step(weights, DENSITY, seed=step)
    return weights


def main(board: str, base: str, num_versions: int) -> None:
    with Publisher.open(
        quick_board(Path(board)), "r", base, threads=1, retry=NO_RETRIES, anchor_every=2
    ) as publisher:
        while publisher.ref.version < num_versions:
            version = publisher.ref.version + 1
            ref = publisher.publish(trained(version), step=version).wait()
            print(f"published {ref.version}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
