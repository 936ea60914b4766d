"""The program's entry: find the verb, parse, run, and turn errors into lines and exit codes."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from stitch.cli import exits
from stitch.cli.console import Console
from stitch.cli.context import CommonConfig, Context
from stitch.cli.registry import VERBS, load_verb
from stitch.cli.text import printable
from stitch.config import add_flags, load
from stitch.errors import UsageError

TAKES_REST = frozenset({"serve"})
"""Verbs that hand what stands after `--` on to another program."""


class Parser(argparse.ArgumentParser):
    """Complains by raising, so that every usage error is reported the same way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stitch` with these arguments and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    console = Console(
        as_json="--json" in own, verbose=any(flag in own for flag in ("-v", "--verbose"))
    )
    try:
        with _logging(console.verbose):
            return _run(own, tuple(arguments[len(own) + 1 :]), console)
    except SystemExit as stop:  # argparse, after --help or --version
        return stop.code if isinstance(stop.code, int) else exits.OK
    except KeyboardInterrupt as error:
        console.error("KeyboardInterrupt", "interrupted")
        return exits.code_for(error)
    except Exception as error:  # the program's edge
        if console.verbose:
            traceback.print_exc()
        console.error(type(error).__name__, _explain(error))
        return exits.code_for(error)


def _run(arguments: list[str], rest: tuple[str, ...], console: Console) -> int:
    parser = _top_parser()
    if not arguments:
        raise UsageError(f"no command is given: one of {', '.join(VERBS)}")
    first = parser.parse_args(arguments)
    if first.verb not in VERBS:
        raise UsageError(_unknown(first.verb))
    verb = load_verb(first.verb)
    own = Parser(
        prog=f"stitch {first.verb}",
        description=verb.description,
        epilog=exits.TABLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(own)
    _add_common(own)
    if rest and first.verb not in TAKES_REST:  # to all others `--` only ends the flags
        first.rest += ["--", *rest]
        rest = ()
    args = own.parse_args(first.rest)
    flags = {
        name: getattr(args, name) if getattr(args, name) is not None else getattr(first, name)
        for name in ("board", "run", "signing_key", "trusted_keys", "config")
    }
    file = flags.pop("config") or os.environ.get("STITCH_CONFIG")
    context = Context(
        console=console,
        settings=load(CommonConfig, "", file=file, flags=flags),
        config_file=Path(file) if file else None,
        rest=rest,
    )
    return verb.run(args, context)


def _top_parser() -> Parser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name.ljust(width)}  {summary}" for name, (_, summary) in VERBS.items())
    parser = Parser(
        prog="stitch",
        usage="stitch [options] COMMAND ...",
        description="Lossless weight patches from an RL trainer to a fleet of rollout engines.",
        epilog=f"commands (`stitch COMMAND --help` says more):\n{verbs}\n\n{exits.TABLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    _add_common(parser)
    parser.add_argument("verb", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("common options")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="say more, and show where errors come from"
    )
    group.add_argument("--config", metavar="FILE", help="TOML file (or STITCH_CONFIG)")
    add_flags(group, CommonConfig)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import stitch

        sys.stdout.write(f"stitch {stitch.__version__}\n")
        parser.exit()


def _unknown(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}"
    return f"there is no command {verb!r}; {hint}"


def _explain(error: Exception) -> str:
    from stitch.errors import StitchError

    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    if isinstance(error, StitchError | OSError):
        return printable(" ".join(str(error).split("\n")))
    return f"{type(error).__name__}: {error} (this is a defect; -v shows where)"


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Our own log lines on stderr: warnings, with -v everything worth knowing."""
    log = logging.getLogger("stitch")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
