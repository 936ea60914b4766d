"""What the codec's patches cost, in bytes and in time, next to the wires that others ship.

    python -m benchmarks.codec [--data DIR] --json [--elements N] [--rounds R] [--seconds S]

On the steps of a real run and on synthetic steps of an optimizer, prints one object. Its `rows`
have `data`, `density` (share of elements that changed), `codec`, `cores`,
`bytes_per_changed_element` (whole patches with all their headers), `encode_gb_s` and `apply_gb_s`:
gigabytes (10^9 bytes) of weights a second, counted once. `ratios` are the figures that the codec
is held to, all from this run; `wanted` says what is wanted of each; `memory` and `growth` are what
some of them are made of. `second_cpu` is how many times as much plain arithmetic two threads get
done here as one: 2 on two cores, little more than 1 on two hardware threads of one core.

- Encode: two states in memory -> patch in memory, with all proofs: find + encode + digest. Stitch
  knows the digest of the old state, as its publisher does, and adds the changes to it.
- Apply: patch in memory -> weights in memory changed in place, with all proofs checked. Stitch
  checks before it writes; the others, as published, write first.
- `gaps`, `ranks`, `auto`, `dense` are Stitch's encodings. The others are described, with what
  each includes, in `_codec_sparse.py` and `_codec_xor.py`. `index+value` and `grail` prove nothing.
- `copy`, `xxh3` (128 bits) and `digest` (Stitch's, of everything) are limits: one plain pass over
  the weights, the same figure in both columns.

Every codec's result is compared bit for bit with the new state. Codecs are timed in turns and the
best turn of each counts, since on a shared machine other work only ever adds to the time taken.
One core means that the process is kept on one and its own time is counted (nothing waits, so that
it is the elapsed time of an idle machine); for more cores it is elapsed time. `..._elapsed_gb_s`
are by elapsed time throughout. Between turns the weights are restored by a whole copy, so that no
codec finds the changed places in the cache.

Real data is measured step by step for sizes (`bytes_per_changed_element` is the mean,
`bytes_by_step` has all), and with all steps side by side as one model for time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._command import command_line

Row = dict[str, Any]


def main() -> int:
    from benchmarks._codec_tables import tables

    args = _parse()
    result = _run(args)
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(tables(result)))
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line("codec", __doc__)
    parser.add_argument("--data", help="folder of the real run; default: STITCH_REAL_DATA")
    parser.add_argument("--no-real", action="store_true", help="leave the real run out")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of a synthetic model")
    parser.add_argument("--densities", default="0.05,0.2,0.5,1,3,20", help="in percent")
    parser.add_argument("--codecs", help="comma-separated; default: all")
    parser.add_argument("--cores", default="1,2", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=9, help="turns at most, for each row")
    parser.add_argument("--seconds", type=float, default=7.0, help="per data and cores, about")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    return parser.parse_args()


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks._codec_data import Synthetic, percent, real_folder
    from benchmarks._codec_figures import Figures
    from benchmarks._codec_growth import measure_growth
    from benchmarks._codec_machine import second_cpu
    from benchmarks._codec_memory import measure_memory
    from benchmarks._codec_timing import codec_names
    from benchmarks._codec_wires import stitch_encodings
    from stitch.codec import warm

    warm()
    codecs = args.codecs.split(",") if args.codecs else codec_names()
    cores = [int(text) for text in args.cores.split(",")]
    if unknown := sorted(set(codecs) - set(codec_names())):
        raise SystemExit(f"unknown codecs {unknown}; there are {codec_names()}")
    rows: list[Row] = []
    folder = None if args.no_real else real_folder(args.data)
    if folder is not None:
        rows += _real_rows(args, folder, codecs, cores)
    synthetic = Synthetic(args.elements)
    for text in args.densities.split(","):
        step = synthetic.step(float(text) / 100)
        _say(f"{step.name}: {percent(round(step.density, 6))} of {step.old.schema.num_elements}")
        rows += _rows(args, step, codecs, cores)
    growth = measure_growth(synthetic.old, rounds=args.rounds)
    del synthetic
    memory = []
    if not args.no_memory:
        own = [name for name in stitch_encodings() if name in codecs]
        memory = measure_memory(args.elements, own, cores)
    ratios, wanted = Figures(rows, memory, growth).all()
    return {
        "benchmark": "codec",
        "elements": args.elements,
        "rows": rows,
        "ratios": ratios,
        "wanted": wanted,
        "memory": memory,
        "growth": {name: round(value) for name, value in growth.items()},
        "second_cpu": round(second_cpu(), 2),
    }


def _real_rows(
    args: argparse.Namespace, folder: Path, codecs: Sequence[str], cores: Sequence[int]
) -> Iterator[Row]:
    from benchmarks._codec_data import real_steps, side_by_side
    from benchmarks._codec_timing import sizes

    steps = list(real_steps(folder))
    costs: dict[str, list[float]] = {}
    for step in steps:
        _say(f"{step.name}: {step.density:.4%} of {step.old.schema.num_elements}")
        for codec, num_bytes in sizes(step, codecs).items():
            costs.setdefault(codec, []).append(num_bytes / step.num_changed)
    for row in _rows(args, side_by_side("real", steps), codecs, cores):
        if row["codec"] in costs:
            by_step = costs[row["codec"]]
            row["bytes_per_changed_element"] = _four_digits(sum(by_step) / len(by_step))
            row["bytes_by_step"] = [_four_digits(cost) for cost in by_step]
        yield row


def _rows(
    args: argparse.Namespace, step: Any, codecs: Sequence[str], cores: Sequence[int]
) -> Iterator[Row]:
    from benchmarks._codec_timing import measure

    num_bytes, num_changed, density = step.num_bytes, step.num_changed, step.density

    def speed(took_s: float) -> float:
        return _four_digits(num_bytes / took_s / 1e9)

    for count in cores:
        timings = measure(step, codecs, count, rounds=args.rounds, budget_s=args.seconds)
        for codec, timing in timings.items():
            size = timing.num_bytes
            yield {
                "data": step.name,
                "density": round(density, 7),
                "codec": codec,
                "cores": count,
                "bytes_per_changed_element": size and _four_digits(size / num_changed),
                "encode_gb_s": speed(timing.encode.on(count)),
                "apply_gb_s": speed(timing.apply.on(count)),
                "encode_elapsed_gb_s": speed(timing.encode.elapsed_s),
                "apply_elapsed_gb_s": speed(timing.apply.elapsed_s),
            }


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
