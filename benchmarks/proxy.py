"""What a replica's proxy adds to a request: latency, and throughput against no proxy.

    python -m benchmarks.proxy --json [--connections 1,16,128] [--seconds S] [--stack starlette]

Four processes on loopback: a stub engine that answers at once with about 1 KB of completion JSON
(without stamps), the replica's proxy doing what it does in service (constraint parsed and cut out,
gate, cache salt and both versions spliced in, headers, metrics), a closed-loop load generator, and
this one. Direct and proxied turns alternate within one run, so that both meet the same noise.

Per row: `added_p50_ms` and `added_p99_ms`, the proxied quantile less the direct one, and
`requests_per_s_direct` and `requests_per_s_proxied`. `--stack` measures other HTTP stacks with the
same rewriting in the same run, under `stacks`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks._command import command_line

STACKS = ("aiohttp", "starlette")
START_DEADLINE_S = 30.0

Row = dict[str, Any]


def main() -> int:
    args = _parse()
    counts = [int(text) for text in args.connections.split(",")]
    rows: dict[str, list[Row]] = {"replica": [], **{stack: [] for stack in args.stack}}
    with contextlib.ExitStack() as processes:
        ports = {"direct": processes.enter_context(_process("_stub_engine"))}
        engine = f"--engine-port={ports['direct']}"
        ports["replica"] = processes.enter_context(_process("_proxy_server", engine))
        for stack in args.stack:
            arguments = (engine, f"--stack={stack}")
            ports[stack] = processes.enter_context(_process("_proxy_stacks", *arguments))
        for connections in counts:
            measured = _load(ports, connections, args.seconds)
            for name, list_of_rows in rows.items():
                list_of_rows.append(_row(connections, measured["direct"], measured[name]))
    result: dict[str, Any] = {"benchmark": "proxy", "rows": rows.pop("replica")}
    if rows:
        result["stacks"] = rows
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line("proxy", __doc__)
    parser.add_argument("--connections", default="1,16,128", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=4.0, help="per target and row")
    parser.add_argument("--stack", action="append", default=[], choices=STACKS)
    return parser.parse_args()


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[int]:
    """A server of this package as a child process; yields the port it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            raise SystemExit(f"benchmarks.{module} ended with status {process.wait()}")
        yield int(line)
    finally:
        process.terminate()
        process.wait(START_DEADLINE_S)


def _load(ports: dict[str, int], connections: int, seconds: float) -> dict[str, Row]:
    targets = [f"--target={name}={port}" for name, port in ports.items()]
    command = [sys.executable, "-m", "benchmarks._load", *targets]
    command += ["--connections", str(connections), "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    measured: dict[str, Row] = json.loads(done.stdout)
    return measured


def _row(connections: int, direct: Row, proxied: Row) -> Row:
    return {
        "connections": connections,
        "added_p50_ms": round(proxied["p50_ms"] - direct["p50_ms"], 3),
        "added_p99_ms": round(proxied["p99_ms"] - direct["p99_ms"], 3),
        "requests_per_s_direct": round(direct["requests_per_s"], 1),
        "requests_per_s_proxied": round(proxied["requests_per_s"], 1),
    }


def _print_table(result: dict[str, Any]) -> None:
    print("stack      conns  added p50 ms  added p99 ms  direct 1/s  proxied 1/s  share")
    for stack, rows in {"replica": result["rows"], **result.get("stacks", {})}.items():
        for row in rows:
            share = row["requests_per_s_proxied"] / row["requests_per_s_direct"]
            print(
                f"{stack:9}  {row['connections']:5}  {row['added_p50_ms']:12.2f}"
                f"  {row['added_p99_ms']:12.2f}  {row['requests_per_s_direct']:10.0f}"
                f"  {row['requests_per_s_proxied']:11.0f}  {share:5.3f}"
            )


if __name__ == "__main__":
    sys.exit(main())
