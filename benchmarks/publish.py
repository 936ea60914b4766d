"""What publishing costs a trainer: how long `publish` blocks it, and how much memory it takes.

    python -m benchmarks.publish --json [--gb 1.0]

For a BF16 model and for an FP32 master of it (the served view is BF16 both times), a child process
holds the model and publishes it to a board in a temporary directory; every version changes about
0.5 % of the elements.

- `blocked_over_copy`: median seconds that `publish` blocks, over the median seconds of `copy_` of
  the same tensors into buffers of their own dtype whose pages exist; the two are interleaved, run
  on the same number of torch threads, and the version is waited for before the next measurement.
- `peak_over_view`: growth of the process's peak resident memory from just before `Publisher.start`,
  when all that the caller owns exists, over start and several publishes; in sizes of the view.

The top-level figures are the worse of the two rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._command import command_line
from benchmarks._memory import peak_bytes, start_watching

HIDDEN, INTERMEDIATE, VOCAB = 1024, 2816, 32_768
SOURCE_DTYPES = ("bfloat16", "float32")
CHANGE_EVERY = 200
"""One element in so many changes per version."""


def main() -> int:
    args = _parse()
    if args.measure is not None:
        print(json.dumps(_measure(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="stitch-bench-", dir=args.dir) as directory:
        base = Path(directory) / "base.safetensors"
        _write_base(base, args.gb)
        rows = [_row(args, base, dtype, Path(directory)) for dtype in SOURCE_DTYPES]
    result = {
        "benchmark": "publish",
        "blocked_over_copy": max(row["blocked_over_copy"] for row in rows),
        "peak_over_view": max(row["peak_over_view"] for row in rows),
        "rows": rows,
    }
    print(json.dumps(result, indent=None if args.json else 2))
    return 0


def _parse() -> argparse.Namespace:
    parser = command_line("publish", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the view in GB")
    parser.add_argument("--rounds", type=int, default=15, help="timed pairs per source dtype")
    parser.add_argument("--torch-threads", type=int, default=1, help="for publish and copy alike")
    parser.add_argument("--dir", default=None, help="where the temporary files go")
    parser.add_argument("--measure", choices=SOURCE_DTYPES, help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    parser.add_argument("--board", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(args: argparse.Namespace, base: Path, dtype: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.publish", "--measure", dtype]
    command += ["--base", str(base), "--board", str(directory / f"board-{dtype}")]
    command += ["--rounds", str(args.rounds), "--torch-threads", str(args.torch_threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.torch_threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _shapes(num_bytes: float) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama-like model whose BF16 view has about so many bytes, at least one layer."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    }
    layer_bytes = 2 * sum(shape[0] * (shape[1] if shape[1:] else 1) for shape in layer.values())
    fixed_bytes = 2 * VOCAB * HIDDEN
    num_layers = max(1, round((num_bytes - fixed_bytes) / layer_bytes))
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(num_layers)
        for name, shape in layer.items()
    }
    return shapes | {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}


def _write_base(path: Path, gigabytes: float) -> None:
    import numpy as np

    from stitch.tensors import HostWeights, write_safetensors
    from stitch.types import Schema, TensorSpec

    shapes = _shapes(gigabytes * 1e9)
    schema = Schema.of(TensorSpec.of(name, "BF16", shape) for name, shape in shapes.items())
    weights = HostWeights.allocate(schema)
    random = np.random.default_rng(0)
    for spec in schema.tensors:
        values = random.standard_normal(spec.num_words, np.float32) * np.float32(0.02)
        weights.words(spec.name)[...] = values.view(np.uint32) >> 16
    write_safetensors(path, weights)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """One row, in a process of its own."""
    import torch

    from stitch import Publisher
    from stitch.tensors import open_checkpoint

    torch.set_num_threads(args.torch_threads)
    with open_checkpoint(args.base) as checkpoint:
        view_bytes = checkpoint.schema.num_bytes
        model = _load_model(checkpoint, getattr(torch, args.measure))
    gc.collect()
    before = start_watching()
    with Publisher.start(args.board, "bench", args.base) as publisher:
        versions = []
        for step in range(1, 4):
            _train(model, step)
            versions.append(publisher.publish(model, step=step))
            versions[-1].wait()
        peak = peak_bytes()
        blocked, copied = _time_pairs(publisher, model, args.rounds)
    stats = versions[-1].stats
    return {
        "source_dtype": args.measure,
        "view_bytes": view_bytes,
        "torch_threads": args.torch_threads,
        "rounds": args.rounds,
        "publish_blocked_s": round(median(blocked), 4),
        "copy_s": round(median(copied), 4),
        "blocked_over_copy": round(median(blocked) / median(copied), 3),
        "peak_added_bytes": peak - before,
        "peak_over_view": round((peak - before) / view_bytes, 3),
        "density": stats.density,
        "patch_bytes": stats.num_bytes,
    }


def _load_model(checkpoint: Any, dtype: Any) -> dict[str, Any]:
    import torch

    model = {}
    for spec in checkpoint.schema.tensors:
        tensor = torch.empty(spec.shape, dtype=torch.bfloat16)
        words = checkpoint.read(spec.name, 0, spec.num_words)
        tensor.view(torch.int16).view(-1).numpy().view("u2")[...] = words
        model[spec.name] = tensor.to(dtype)
    return model


def _train(model: dict[str, Any], step: int) -> None:
    """Move random elements by one unit in the last place of their BF16 value."""
    import torch

    random = torch.Generator().manual_seed(step)
    for tensor in model.values():
        narrow = tensor.dtype == torch.bfloat16
        bits = tensor.view(torch.int16 if narrow else torch.int32).view(-1)
        places = torch.randint(bits.numel(), (bits.numel() // CHANGE_EVERY,), generator=random)
        bits[places] += 1 if narrow else 1 << 16


def _time_pairs(
    publisher: Any, model: dict[str, Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds that `publish` blocks and that a plain copy takes, in alternating order."""
    import torch

    copies = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    blocked: list[float] = []
    copied: list[float] = []

    def publish() -> Any:
        started_s = time.perf_counter()
        ticket = publisher.publish(model, step=step)
        blocked.append(time.perf_counter() - started_s)
        return ticket

    def copy() -> None:
        started_s = time.perf_counter()
        for name, tensor in model.items():
            copies[name].copy_(tensor)
        copied.append(time.perf_counter() - started_s)

    for step in range(10, 10 + rounds):
        _train(model, step)
        if step % 2:
            copy()
        publish().wait()
        publisher.flush()
        if not step % 2:
            copy()
    return blocked, copied


if __name__ == "__main__":
    sys.exit(main())
