"""What a replica k versions behind fetches: merged patches against the chain and the difference.

    python -m benchmarks.catchup [--data DIR] --json [--elements N]

64 versions are published to a board in a temporary directory, one for each step of a simulated
training (see `_catchup_steps.py`) that starts from the weights of the real run if they are there,
else from synthetic ones. Then replicas catch up: first over the chain of single patches, then,
after `stitch compact`, over merged patches. The bytes and objects are counted at the store. With
the real run's data its eight steps are published and caught up with as well.

Fields of `rows`: `behind`; `bytes` and `objects` that were read, records included, and `requests`,
those included that found nothing; `bytes_chain` and `objects_chain` without merged patches;
`bytes_direct`, the patch from the one version straight to the other; seconds of both journeys from
the store to proven weights. `anywhere` has the same between versions that are not multiples of the
distance: means, and the worst of `num_pairs`. `steps` has the share of elements that a step
changes, and how many times as many the first eight at once change as one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._catchup_steps import training
from benchmarks._codec_data import Synthetic, copy_of, real_folder, real_steps
from benchmarks._command import command_line, table_of
from stitch.board import Board, ObjectInfo, Run, open_board
from stitch.board.stores.store import ObjectStore, StoreOver
from stitch.codec import PatchEncoder, diff_update
from stitch.mirror import Mirror
from stitch.publish import Publisher
from stitch.publish.compact import Compactor
from stitch.tensors import HostWeights, open_checkpoint, write_safetensors

NUM_STEPS = 64
DISTANCES = (1, 8, 32, 64)
ANYWHERE = {3: (1, 22, 41), 8: (3, 21, 53), 32: (3, 14, 29), 57: (2, 3, 6)}
"""Distance -> versions to start from."""
AT_ONCE = 8
"""Steps that the real run has."""
WANTED = {"over_direct_64": "<= 1.25", "over_chain_64": "<= 0.5"}


class CountingStore(StoreOver):
    """Counts what is read from a store."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.num_bytes = self.num_objects = self.num_requests = 0

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return self._counted(self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        return self._counted(self._inner.get_range(key, start, num_bytes))

    def _counted(self, data: bytes | None) -> bytes | None:
        self.num_requests += 1
        if data is not None:
            self.num_objects += 1
            self.num_bytes += len(data)
        return data

    def head(self, key: str) -> ObjectInfo | None:
        self.num_requests += 1
        return self._inner.head(key)

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        self.num_requests += 1
        return self._inner.list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        self.num_requests += 1
        return self._inner.list_folders(prefix)


@dataclass(frozen=True, kw_only=True)
class Journey:
    """What one catch-up took."""

    num_bytes: int
    num_objects: int
    num_requests: int
    seconds_s: float


class World:
    """A published run whose every version is known."""

    def __init__(self, name: str, start: HostWeights, steps: Iterator[HostWeights], root: Path):
        self.name = name
        self.board = open_board(root / "board")
        self.versions = [copy_of(start)]
        base = root / "base.safetensors"
        write_safetensors(base, start)
        with Publisher.start(self.board, "r", base, view="checkpoint") as publisher:
            for number, weights in enumerate(steps, 1):
                publisher.publish(weights, step=number).wait()
                self.versions.append(copy_of(weights))
        self.run: Run = self.board.open_run("r")

    def catch_up(self, start: int, stop: int) -> Journey:
        """A replica that holds `start` moves to `stop`, proven."""
        mirror = Mirror.load(self.versions[start])
        mirror.identify(self.run, range(len(self.versions) - 1, 0, -1))
        store = CountingStore(self.board.store)
        run = Board(store).open_run("r")
        assert run.schema == mirror.schema  # fetched here: a replica that runs has it
        store.num_bytes = store.num_objects = store.num_requests = 0
        began_s = time.perf_counter()
        mirror.advance(run, stop)
        seconds_s = time.perf_counter() - began_s
        assert mirror.digest == self.run.digest(stop)
        return Journey(
            num_bytes=store.num_bytes,
            num_objects=store.num_objects,
            num_requests=store.num_requests,
            seconds_s=seconds_s,
        )

    def steps(self) -> dict[str, Any]:
        """How much changes in a step, and how much less in `AT_ONCE` of them at once."""
        densities = [self.run.manifest(v).stats.density for v in range(1, len(self.versions))]
        row = {
            "data": self.name,
            "least_density": round(min(densities), 5),
            "most_density": round(max(densities), 5),
        }
        if len(densities) >= AT_ONCE:
            at_once = diff_update(self.versions[0], self.versions[AT_ONCE]).num_changed
            one_by_one = sum(densities[:AT_ONCE]) * self.run.schema.num_elements
            row["at_once_over_one_by_one"] = round(at_once / one_by_one, 3)
        return row

    def direct_bytes(self, start: int, stop: int) -> int:
        encoder = PatchEncoder(self.versions[start], self.versions[stop])
        return sum(len(part) for part in encoder.parts())


def main() -> int:
    args = _parse()
    folder = None if args.no_real else real_folder(args.data)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="stitch-bench-", dir=args.dir) as directory:
        world = _simulated(args, folder, Path(directory) / "simulated")
        distances = [distance for distance in DISTANCES if distance < args.steps] + [args.steps]
        anywhere = {k: starts for k, starts in ANYWHERE.items() if k + max(starts) <= args.steps}
        compaction, simulated, means = _measure(world, distances, anywhere)
        rows += simulated
        steps = [world.steps()]
        if folder is not None:
            real = _real(folder, Path(directory) / "real")
            rows += _measure(real, (1, 2, 4, 8), {})[1]
            steps.append(real.steps())
    last = simulated[-1]
    result = {
        "benchmark": "catchup",
        f"over_direct_{args.steps}": last["over_direct"],
        f"over_chain_{args.steps}": last["over_chain"],
        f"objects_{args.steps}": last["objects"],
        "wanted": WANTED,
        "num_elements": world.run.schema.num_elements,
        "steps": steps,
        "compaction": compaction,
        "rows": rows,
        "anywhere": means,
    }
    if args.json:
        print(json.dumps(result))
    else:
        _print_tables(result)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line("catchup", __doc__)
    parser.add_argument("--data", help="folder of the real run")
    parser.add_argument(
        "--elements", type=int, help="simulate on so many synthetic elements instead"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="simulated steps")
    parser.add_argument("--no-real", action="store_true", help="leave the real run out")
    parser.add_argument("--dir", default=None, help="where the temporary files go")
    return parser.parse_args()


def _simulated(args: argparse.Namespace, folder: Path | None, root: Path) -> World:
    root.mkdir()
    if folder is None or args.elements is not None:
        start = Synthetic(args.elements or 1 << 24).old
        name = "simulated from synthetic weights"
    else:
        with open_checkpoint(folder / "base.safetensors") as checkpoint:
            start = HostWeights.load(checkpoint)
        name = "simulated from the real weights"
    return World(name, start, training(start, args.steps), root)


def _real(folder: Path, root: Path) -> World:
    root.mkdir()
    steps = list(real_steps(folder))
    return World("real", steps[0].old, (step.new for step in steps), root)


def _measure(
    world: World, distances: Sequence[int], anywhere: dict[int, tuple[int, ...]]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """What compaction cost; rows to the newest version; means between any versions."""
    newest = len(world.versions) - 1
    pairs = [(newest - distance, newest) for distance in distances]
    others = [(start, start + k) for k, starts in anywhere.items() for start in starts]
    chains = {pair: world.catch_up(*pair) for pair in pairs + others}
    began_s = time.perf_counter()
    compactor = Compactor(world.run, base=Path(world.run.record.base))
    written = compactor.compact()
    compactor.close()
    compaction = {
        "merged_patches": len(written),
        "bytes": sum(merged.num_bytes for merged in written),
        "bytes_chain": sum(world.run.manifest(v).num_bytes for v in range(1, newest + 1)),
        "seconds_s": round(time.perf_counter() - began_s, 2),
    }
    rows = [_row(world, pair, chains[pair]) for pair in pairs]
    means = []
    for distance, starts in anywhere.items():
        some = [_row(world, (s, s + distance), chains[s, s + distance]) for s in starts]
        means.append(
            {
                "behind": distance,
                "num_pairs": len(some),
                "objects": round(mean(row["objects"] for row in some), 1),
                "over_direct": round(mean(row["over_direct"] for row in some), 3),
                "worst_over_direct": max(row["over_direct"] for row in some),
                "over_chain": round(mean(row["over_chain"] for row in some), 3),
            }
        )
    return compaction, rows, means


def _row(world: World, pair: tuple[int, int], chain: Journey) -> dict[str, Any]:
    journey = world.catch_up(*pair)
    direct = world.direct_bytes(*pair)
    return {
        "data": world.name,
        "behind": pair[1] - pair[0],
        "bytes": journey.num_bytes,
        "objects": journey.num_objects,
        "requests": journey.num_requests,
        "bytes_chain": chain.num_bytes,
        "objects_chain": chain.num_objects,
        "bytes_direct": direct,
        "over_direct": round(journey.num_bytes / direct, 3),
        "over_chain": round(journey.num_bytes / chain.num_bytes, 3),
        "seconds_s": round(journey.seconds_s, 3),
        "seconds_chain_s": round(chain.seconds_s, 3),
    }


def _print_tables(result: dict[str, Any]) -> None:
    for name in filter(result.get, ("rows", "anywhere")):
        print(*table_of(result[name]), sep="\n")
    print(json.dumps({key: result[key] for key in result if key not in ("rows", "anywhere")}))


if __name__ == "__main__":
    sys.exit(main())
