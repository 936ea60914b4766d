"""A patch against the whole checkpoint over a slow link, and how both grow with replicas.

    sudo python -m benchmarks.link [--data DIR] [--json] [--elements N]

Two network namespaces with a link of 100 Mbit/s and 80 ms round trip between them (see
`_link_relay.py`). At home are the trainer and its store, SeaweedFS over S3; far away the replicas
of one host, real sidecars before engines in memory. The versions are the real run's steps, eight
copies of its model side by side (see `_link_steps.py`); without its data, simulated steps of a
synthetic model of `--elements`.

A patch is timed from the call of `publish` until the last replica's engine serves the version. The
checkpoint is timed, in the same run, from when the trainer begins to save it until the last replica
has it in memory: no engine has to load it, which favours it. Both are found by polling.

Fields: `speedup` (`checkpoint_s` over `patch_s`), those two in seconds for one replica without the
cache, `patch_bytes`, `checkpoint_bytes`, `wire_s` (the checkpoint's bytes at the link's rate, which
nothing that ships whole checkpoints can beat) and `speedup_over_wire`; `link`, as measured; `load`,
of the machine at the end; `rows`
with `replicas`, `cache`, and for both ways seconds (`_home_s`: until it is on the store) and the
megabytes that crossed the link.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import _link_store
from benchmarks._codec_data import real_folder
from benchmarks._command import command_line, table_of
from benchmarks._link_net import HOME_ADDRESS, Child, Network, check_machine, network

NUM_PATCHES = 5
NUM_ELEMENTS = 1 << 27
POLL_S = 0.1
WANTED = {"speedup": ">= 25"}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One version, or one checkpoint, on its way."""

    seconds_s: float
    """Until the last replica has it."""
    home_s: float
    """Of these, until it is on the store."""
    num_bytes: int
    crossed_bytes: int
    """Over the link, to all replicas, with headers and polls."""


class Bench:
    """One published run, and replicas that come and go."""

    def __init__(self, net: Network, publisher: Child, base: Path, folder: Path) -> None:
        self._net = net
        self._publisher = publisher
        self._base = base
        self._folder = folder
        self._num_hosts = 0

    @contextmanager
    def replicas(self, count: int, *, cache: bool) -> Iterator[list[Child]]:
        """Replicas of one new host, all of them serving the newest version."""
        self._num_hosts += 1
        host = self._folder / f"host-{self._num_hosts}"
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, host, ignore_errors=True)
            children = []
            for number in range(count):
                args: list[object] = [number, _link_store.BOARD, self._base, POLL_S]
                args += [host / f"scratch-{number}", *([host / "cache"] if cache else [])]
                (host / f"scratch-{number}").mkdir(parents=True)
                children.append(
                    stack.enter_context(self._net.python(self._net.far, "_link_replica", *args))
                )
            for child in children:
                child.hear()
            # The versions repeat after a while: what was fetched to catch up must not be met again.
            for entry in (host / "cache").glob("*.blob"):
                entry.unlink()
            yield children

    def row(self, count: int, num_patches: int, *, cache: bool) -> dict[str, Any]:
        with self.replicas(count, cache=cache) as children:
            self._time("patch", children)  # the first one: everything has been used once
            patches = [self._time("patch", children) for _ in range(num_patches)]
            checkpoint = self._time("checkpoint", children)
        return {
            "replicas": count,
            "cache": cache,
            "patch_s": round(median(patch.seconds_s for patch in patches), 3),
            "patch_worst_s": round(max(patch.seconds_s for patch in patches), 3),
            "patch_home_s": round(median(patch.home_s for patch in patches), 3),
            "patch_bytes": round(median(patch.num_bytes for patch in patches)),
            "patch_link_mb": round(median(patch.crossed_bytes for patch in patches) / 1e6, 3),
            "checkpoint_s": round(checkpoint.seconds_s, 2),
            "checkpoint_home_s": round(checkpoint.home_s, 2),
            "checkpoint_bytes": checkpoint.num_bytes,
            "checkpoint_link_mb": round(checkpoint.crossed_bytes / 1e6, 1),
        }

    def _time(self, what: str, children: Sequence[Child]) -> Timed:
        before = self._net.link_bytes()
        if what == "checkpoint":
            version = self._publisher.ask(what="patch")["version"]
            for child in children:
                _hear(child, "patch", version)
            before = self._net.link_bytes()
            for child in children:
                child.tell(version=version)  # from now on they look for it
        done = self._publisher.ask(what=what)
        last_s = max(_hear(child, what, done["version"]) for child in children)
        return Timed(
            seconds_s=last_s - done["began_s"],
            home_s=done["here_s"],
            num_bytes=done["bytes"],
            crossed_bytes=self._net.link_bytes() - before,
        )


def _hear(child: Child, what: str, version: int) -> float:
    """When the replica had it."""
    while True:
        heard = child.hear()
        if heard["what"] == what and heard["version"] == version:
            return float(heard["at_s"])


def main() -> int:
    args = _parse()
    check_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    _link_store.weed()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory(prefix="stitch-link-", dir=args.dir) as directory:
        try:
            result = _measure(args, Path(directory))
        except BaseException:
            for log in sorted(Path(directory).glob("*.log")):
                tail = log.read_text(errors="replace")[-1500:]
                print(f"--- {log.name}\n{tail}", file=sys.stderr)
            raise
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    real = real_folder(args.data) if args.elements is None else None
    base = folder / "base.safetensors"
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(folder, args.mbit_s, args.rtt_ms))
        probe = stack.enter_context(net.python(net.home, "_link_probe", "serve", HOME_ADDRESS))
        probe.hear()
        with net.python(net.far, "_link_probe", "measure", HOME_ADDRESS) as measuring:
            link = measuring.hear()
        store = _link_store.command(folder / "store")
        stack.enter_context(net.process("store", net.home, store))
        with net.python(net.home, "_link_store") as waiting:
            waiting.hear()
        given = [_link_store.BOARD, base, args.elements or NUM_ELEMENTS, *filter(None, [real])]
        publisher = stack.enter_context(net.python(net.home, "_link_publisher", *given))
        name = publisher.hear()["data"]
        bench = Bench(net, publisher, base, folder)
        rows = [
            bench.row(count, args.patches, cache=cache)
            for count in args.replicas
            for cache in (False, True)
        ]
    return _result(args, name, link, rows)


def _result(
    args: argparse.Namespace, name: str, link: dict[str, float], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    load = [round(number, 1) for number in os.getloadavg()]  # of the last 1, 5 and 15 minutes
    one = next((row for row in rows if row["replicas"] == 1 and not row["cache"]), rows[0])
    wire_s = 8 * one["checkpoint_bytes"] / args.mbit_s / 1e6
    return {
        "benchmark": "link",
        "speedup": round(one["checkpoint_s"] / one["patch_s"], 1),
        "patch_s": one["patch_s"],
        "checkpoint_s": one["checkpoint_s"],
        "speedup_over_wire": round(wire_s / one["patch_s"], 1),
        "wire_s": round(wire_s, 2),
        "patch_bytes": one["patch_bytes"],
        "checkpoint_bytes": one["checkpoint_bytes"],
        "wanted": WANTED,
        "data": name,
        "link": {"asked_mbit_s": args.mbit_s, "asked_rtt_ms": args.rtt_ms, **link},
        "store": "SeaweedFS over S3",
        "engine": "in memory, behind the real sidecar",
        "poll_s": POLL_S,
        "load": load,
        "rows": rows,
    }


def _parse() -> argparse.Namespace:
    parser = command_line("link", __doc__)
    parser.add_argument("--data", help="folder of the real run")
    parser.add_argument("--elements", type=int, help="simulate on so many synthetic elements")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--patches", type=int, default=NUM_PATCHES, help="timed patches of a row")
    parser.add_argument("--mbit-s", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=80.0, help="round trip")
    parser.add_argument("--dir", default=None, help="where the temporary files go")
    return parser.parse_args()


def _print_table(result: dict[str, Any]) -> None:
    print(*table_of(result["rows"]), sep="\n")
    print(json.dumps({key: result[key] for key in result if key != "rows"}))


if __name__ == "__main__":
    sys.exit(main())
