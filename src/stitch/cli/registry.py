"""The verbs: name, module and one line of help. Modules are imported when their verb is chosen.

A verb's module has `DESCRIPTION`, `add_arguments(parser)` and `run(args, context) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stitch.cli.context import Context


@dataclass(frozen=True, kw_only=True)
class Verb:
    """What main needs to know of a verb to run it."""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Context], int]


VERBS: Mapping[str, tuple[str, str]] = {
    "demo": ("demo", "train a small model with RL while replicas follow it by patches"),
    "serve": ("serve", "run a replica: an engine kept on the newest version"),
    "publish": ("publish", "publish a checkpoint directory as the run's next version"),
    "log": ("log", "list versions, newest first"),
    "show": ("show", "everything about one version"),
    "status": ("status", "versions, replicas and their lag"),
    "diff": ("diff", "write the patch from one checkpoint to another"),
    "apply": ("apply", "apply patches to a checkpoint"),
    "inspect": ("inspect", "what a patch file says about itself"),
    "verify": ("verify", "prove that a checkpoint or replicas hold a version"),
    "checkout": ("checkout", "write a version as a plain Hugging Face checkpoint"),
    "fork": ("fork", "begin a new run with a version of another one"),
    "anchor": ("anchor", "store a version whole on the board"),
    "compact": ("compact", "merge patches for replicas that are far behind"),
    "mirror": ("mirror", "copy a board's runs to another board"),
    "keygen": ("keygen", "make a key pair for signing what is published"),
    "gc": ("gc", "remove what a retention policy does not keep"),
    "fsck": ("fsck", "check everything that a run has on the board"),
}
"""Verb -> (module under stitch.cli, summary)."""


def load_verb(name: str) -> Verb:
    """Import the verb's module."""
    module = importlib.import_module(f"stitch.cli.{VERBS[name][0]}")
    return Verb(description=module.DESCRIPTION, add_arguments=module.add_arguments, run=module.run)
