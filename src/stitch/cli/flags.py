"""Flags that several verbs share; light to import."""

from __future__ import annotations

import argparse


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="compute threads (default: one per CPU)"
    )


def positive_int(text: str) -> int:
    """An argparse type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
