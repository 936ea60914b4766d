"""`python -m stitch.engines.embedded`: start the embedded engine.

The control token comes in the environment variable STITCH_ENGINE_TOKEN, never on the command line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from stitch.engines.wire import TOKEN_ENV
from stitch.errors import StitchError, UsageError


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    _limit_threads(options.threads)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _serve(options)
    except StitchError as error:
        print(f"stitch engine: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stitch.engines.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", help="default: the value of --model")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-slots", type=int, default=16, help="choices generated at a time")
    parser.add_argument("--max-len", type=int, default=512, help="prompt and output tokens")
    parser.add_argument("--max-queue", type=int, default=256, help="choices that may wait")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--view", default="bf16", help="what is served: bf16 or checkpoint")
    parser.add_argument("--log-level", default="WARNING")
    return parser


def _limit_threads(threads: int) -> None:
    """Before torch and numba are imported: they read these once.

    Passive waiting matters: threads that spin at barriers slow a busy machine down tenfold.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("NUMBA_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _serve(options: argparse.Namespace) -> None:
    token = os.environ.pop(TOKEN_ENV, "")
    if len(token) < 16:
        raise UsageError(f"set {TOKEN_ENV} to a secret of at least 16 characters")
    for name in ("max_slots", "max_len", "max_queue", "threads"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    import torch
    from aiohttp import web

    from stitch.engines.embedded.model import load_model
    from stitch.engines.embedded.server import ServerOptions, build_app

    torch.set_num_threads(options.threads)
    loaded = load_model(
        options.model, dtype=options.dtype, device=options.device, view=options.view
    )
    if options.max_len > loaded.geometry.max_positions:
        raise UsageError(
            f"--max-len {options.max_len} exceeds the model's {loaded.geometry.max_positions}"
        )
    app = build_app(
        loaded,
        ServerOptions(
            model_name=options.served_model_name or options.model,
            max_slots=options.max_slots,
            max_len=options.max_len,
            max_queue=options.max_queue,
            threads=options.threads,
        ),
        token=token,
    )
    web.run_app(
        app,
        host=options.host,
        port=options.port,
        print=None,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=2.0,
    )


if __name__ == "__main__":
    sys.exit(main())
