"""`stitch demo`: the whole chain on this machine, in a few minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli.context import Context
from stitch.cli.flags import positive_int

DESCRIPTION = """\
Train a small language model with RL on this machine while replicas serve its rollouts
and follow it by patches; one joins late, one is killed and comes back. Ends with a
table of all versions and the proof that every replica holds the trainer's weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model directory or hub name (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny random model: under a minute in all"
    )
    parser.add_argument(
        "--engine",
        choices=("embedded", "vllm"),
        default="embedded",
        help="what the replicas serve with (default: embedded); with vllm there are two, not three",
    )
    parser.add_argument(
        "--engine-python",
        metavar="PY",
        type=Path,
        help="interpreter of the environment that vLLM is installed in (default: this one)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=8, metavar="N", help="optimiser steps (default: 8)"
    )
    parser.add_argument(
        "--work", metavar="DIR", type=Path, help="keep board and logs here (default: temporary)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("demo-report.json"),
        help="the report (default: demo-report.json)",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.demo.settings import DemoSettings
    from stitch.demo.supervise import run_demo

    settings = DemoSettings(
        tiny=args.tiny,
        model=args.model,
        engine=args.engine,
        engine_python=args.engine_python,
        steps=args.steps,
        work=args.work,
        report=args.out,
    )
    return run_demo(settings)
