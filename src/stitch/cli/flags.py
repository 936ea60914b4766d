"""Flags that several verbs share; light to import."""

from __future__ import annotations

import argparse
import math
import threading
from dataclasses import dataclass
from typing import Literal

from stitch.config import setting


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """How patches are encoded; the verb's table of the file, and `STITCH_<VERB>_<NAME>`."""

    encoding: Literal["auto", "gaps", "ranks", "dense"] = setting(
        "auto", help="how changes are encoded: auto takes the smallest of gaps, ranks and dense"
    )
    decode: Literal["any", "changed"] = setting(
        "any",
        help="what decoding may read of the old weights: any words, or only those that change, "
        "for receivers without a host copy",
    )


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


def seconds(text: str) -> float:
    """An argparse type: a time to wait, above zero and no longer than can be waited."""
    number = float(text)
    if not (math.isfinite(number) and 0 < number <= threading.TIMEOUT_MAX):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above zero, got {text}")
    return number
