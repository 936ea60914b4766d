"""What changing weights costs in a real vLLM: a commit, next to what vLLM itself has.

    python -m benchmarks.engine --json --vllm-python PY [--data DIR] [--densities 0.05,0.1,0.5,3]

PY is the interpreter of an environment with vLLM and this package (or STITCH_VLLM_PYTHON). Serves a
model of Qwen3-0.6B's shape with random weights, 596 million parameters made on the spot, and
prints one object. Its `rows`, for a share of changed elements (`density`):

- `stage_ms`: from update set to staged, over HTTP, while the engine could serve;
- `pause_ms`: for how long no step runs: stopping the engine, writing, reading back, labelling,
  going on;
- `nan_staged_ms`: vLLM's own loader of sparse patches, `load_checkpoint_weight_patches`, with the
  same patch. Its time inside the worker alone: no pause, no remote call; its input lies there ready
  for use, its check for repeated indices is off, and its size of batches is the fastest of three;
- `reload_ms`: vLLM's own `reload_weights` of the whole checkpoint from the page cache, again
  inside the worker alone.

All of them run in one engine process, in turns, on the same live weights, and the live weights'
digest is checked after each. Figures are medians, `..._best_ms` the best turns. `copied_share` is
the share of the weights that the commit wrote by copying whole windows instead of single words.
With --data, one more row has the steps of a real run on a slice of SmolLM2.

`load` has what 20 commits cost the requests served meanwhile; see `_engine_load.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._command import command_line, table_of

Row = dict[str, Any]


def main() -> int:
    args = _parse()
    if not args.vllm_python:
        raise SystemExit("name the interpreter of a vLLM: --vllm-python, or STITCH_VLLM_PYTHON")
    with tempfile.TemporaryDirectory(prefix="stitch-benchmark-", dir=args.work) as scratch:
        result = asyncio.run(_run(args, Path(scratch)))
    if args.json:
        print(json.dumps(result))
    else:
        _print_tables(result)
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line("engine", __doc__)
    parser.add_argument("--vllm-python", default=os.environ.get("STITCH_VLLM_PYTHON"))
    parser.add_argument("--data", help="folder of the real run; default: STITCH_REAL_DATA")
    parser.add_argument("--no-real", action="store_true", help="leave the real run out")
    parser.add_argument("--densities", default="0.05,0.1,0.5,3", help="in percent")
    parser.add_argument("--turns", type=int, default=7, help="commits for each row")
    parser.add_argument(
        "--commits", type=int, default=20, help="under load, a multiple of 4; 0: leave that out"
    )
    parser.add_argument("--layers", type=int, default=28, help="fewer for a quick look")
    parser.add_argument("--work", help="where to put the model and logs; default: temporary")
    args = parser.parse_args()
    from benchmarks._engine_load import TURNS

    if args.commits < 0 or args.commits % TURNS:
        parser.error(f"--commits: a multiple of {TURNS}, the turns of the load")
    if args.work and not os.path.isdir(args.work):
        parser.error(f"--work: there is no directory {args.work}")
    return args


async def _run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from benchmarks._codec_data import real_folder
    from stitch.codec import warm

    warm()
    result = await _on_qwen(args, scratch)
    folder = None if args.no_real else real_folder(args.data)
    if folder is not None:
        result["rows"].append(await _on_real_steps(args, scratch, folder))
    return result


async def _on_qwen(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from benchmarks._engine_commits import BASE, Commits
    from benchmarks._engine_load import measure_load
    from benchmarks._engine_models import random_update, write_qwen
    from benchmarks._engine_server import serving

    model = scratch / "qwen"
    weights = write_qwen(model, layers=args.layers)
    _say(f"serving {weights.schema.num_elements / 1e6:.0f} million parameters")
    rows: list[Row] = []
    load: Row | None = None
    async with serving(args.vllm_python, model, weights.schema, scratch / "log") as server:
        commits = Commits(server, model, weights, scratch)
        await commits.start()
        setting = await server.worker("benchmark_setting")
        await commits.choose_chunk(random_update(weights, 0.001, 0, large=False))
        for text in args.densities.split(","):
            density = float(text) / 100
            row = {"data": "random", **await commits.row(density, args.turns)}
            _say(json.dumps(row))
            rows.append(row)
        if args.commits:
            update = random_update(weights, 0.005, 99, large=True)
            load = await measure_load(server, update, BASE, num_commits=args.commits, gap_s=2.0)
            _say(json.dumps(load))
    ratios, wanted = figures(rows)
    return {
        "benchmark": "engine",
        "parameters": weights.schema.num_elements,
        **setting,
        "rows": rows,
        "ratios": ratios,
        "wanted": wanted,
        "load": load,
    }


async def _on_real_steps(args: argparse.Namespace, scratch: Path, folder: Path) -> Row:
    from benchmarks._engine_commits import Commits
    from benchmarks._engine_models import write_real
    from benchmarks._engine_server import serving

    model = scratch / "real"
    weights, updates = write_real(model, folder)
    async with serving(args.vllm_python, model, weights.schema, scratch / "log-real") as server:
        commits = Commits(server, model, weights, scratch)
        await commits.start()
        row = {"data": "real", **await commits.chain(list(updates))}
        _say(json.dumps(row))
        return row


def figures(rows: list[Row]) -> tuple[dict[str, float], dict[str, str]]:
    """(ratios of this run, what is wanted of them)."""
    ratios: dict[str, float] = {}
    for row in rows:
        at = f"{row['density'] * 100:.2g}%"
        for other in ("nan_staged", "reload"):
            ratios[f"pause_over_{other}_{at}"] = round(row["pause_ms"] / row[f"{other}_ms"], 4)
    wanted = {"pause_over_nan_staged_0.1%": "<= 0.1", "pause_over_reload_0.1%": "<= 0.3"}
    pauses = [row["pause_ms"] for row in sorted(rows, key=lambda row: row["density"])]
    growth = [round(b / a, 3) for a, b in itertools.pairwise(pauses)]
    if growth:
        ratios["least_growth_of_pause"] = min(growth)
        wanted["least_growth_of_pause"] = "> 1"
    return ratios, {name: want for name, want in wanted.items() if name in ratios}


def _print_tables(result: dict[str, Any]) -> None:
    columns = ("data", "density", "stage_ms", "pause_ms", "nan_staged_ms", "reload_ms")
    print(*table_of(result["rows"], (*columns, "copied_share")), sep="\n")
    for name, value in result["ratios"].items():
        print(f"{name}: {value} {result['wanted'].get(name, '')}")
    for name, value in (result["load"] or {}).items():
        print(f"{name}: {value}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
