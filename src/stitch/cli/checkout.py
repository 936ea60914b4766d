"""`stitch checkout VERSION --out DIR`: a version as a plain Hugging Face checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from stitch.cli import exits, flags, text, weights
from stitch.cli.console import Console
from stitch.cli.context import Context, parse_version
from stitch.errors import (
    BaseMismatchError,
    CorruptBlobError,
    CorruptCheckpointError,
    NoRouteError,
    UsageError,
    VersionRemovedError,
)

if TYPE_CHECKING:
    from stitch.board import Run
    from stitch.mirror import Mirror

DESCRIPTION = """\
Write a version of the run as a plain Hugging Face checkpoint directory, small files
included, which transformers loads. The base is taken from --base, or from where the
run says it came from, or an anchor on the board stands in for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a number, or latest")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a directory that is not empty"
    )
    add_base_flags(parser)


def add_base_flags(parser: argparse.ArgumentParser) -> None:
    """Where the weights to start from are, and where to work."""
    parser.add_argument("--base", metavar="DIR", type=Path, help="the run's base checkpoint")
    parser.add_argument(
        "--scratch", metavar="DIR", help="where anchors are fetched to (default: temporary folder)"
    )
    flags.add_threads_flag(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.tensors.durable import check_replaceable

    run = context.run
    version = parse_version(args.version, run)
    check_replaceable(args.out, overwrite=args.overwrite)
    mirror = mirror_at(run, version, args, context.console)
    _write(run, mirror, args, context.console)
    digest = run.digest(version)
    weights.prove(args.out, digest, context.console, args.threads)
    record = {
        "run": run.name,
        "version": version,
        "out": str(args.out),
        "digest": digest,
        "bytes": mirror.schema.num_bytes,
        "assets": [ref.name for ref in run.record.assets],
    }
    context.console.result(
        record,
        f"{args.out}: {run.name}@{version}, {text.num_bytes(mirror.schema.num_bytes)}, "
        f"digest {digest} (read back and proven)",
    )
    return exits.OK


def mirror_at(run: Run, version: int, args: argparse.Namespace, console: Console) -> Mirror:
    """The weights of a version in memory, from the base or an anchor, and patches."""
    from stitch.mirror import AdvanceError, lead

    scratch = Path(args.scratch) if args.scratch else None
    mirror = _from_base(run, args.base, args.threads, console)
    if mirror is None:
        mirror = _from_anchor(run, version, scratch, console)
    try:
        with console.progress("applying patches") as progress:
            lead(mirror, run, version, scratch=scratch, progress=progress, threads=args.threads)
    except AdvanceError as error:
        if isinstance(error.__cause__, VersionRemovedError):
            raise error.__cause__ from error
        raise
    return mirror


def _from_base(
    run: Run, given: Path | None, threads: int | None, console: Console
) -> Mirror | None:
    """The base as it was given, else as the run names it; None if that is absent or altered."""
    from stitch.mirror import Mirror, recognise, root_base

    path = given if given is not None else Path(root_base(run))
    if given is None and not path.exists():
        return None
    try:
        with weights.opened(path, run.record.view) as base, console.progress("reading base") as bar:
            mirror = Mirror.load(base.reader, bar, threads)
        recognise(mirror, run)
    except (BaseMismatchError, CorruptCheckpointError) as error:
        if given is not None:
            raise
        console.note(f"note: {path} is not used as the base: {error}")
        return None
    return mirror


def _from_anchor(run: Run, version: int, scratch: Path | None, console: Console) -> Mirror:
    """A mirror at the intact anchor from which `version` is cheapest to reach; of a fork that has
    none, at one of its ancestors."""
    from stitch.board import AnchorStep, plan_route
    from stitch.mirror import Mirror, from_anchor_on_line

    bad: dict[str, CorruptBlobError | CorruptCheckpointError] = {}
    while True:
        try:
            step = plan_route(run, None, version, avoid=frozenset(bad)).steps[0]
        except NoRouteError as error:
            if bad:
                raise next(iter(bad.values())) from error
            if run.record.parent is not None:
                with console.progress("fetching anchor") as progress:
                    return from_anchor_on_line(run, version, scratch=scratch, progress=progress)
            raise UsageError(
                f"nothing to start from: the base of run {run.name!r} is not at {run.record.base} "
                f"and no anchor leads to version {version} ({error}); give --base DIR"
            ) from None
        assert isinstance(step, AnchorStep), "from nothing, only an anchor is a first step"
        try:
            with console.progress("fetching anchor") as progress:
                return Mirror.from_anchor(run, step.record, scratch=scratch, progress=progress)
        except (CorruptBlobError, CorruptCheckpointError) as fault:
            console.note(f"note: anchor {step.to_version} is not used: {fault}")
            bad[step.key] = fault


def _write(run: Run, mirror: Mirror, args: argparse.Namespace, console: Console) -> None:
    """Weights and the run's small files, in a directory that appears whole or not at all."""
    from stitch.tensors import write_checkpoint
    from stitch.tensors.durable import replacing_directory

    with (
        replacing_directory(args.out, overwrite=args.overwrite) as folder,
        console.progress("writing") as progress,
    ):
        write_checkpoint(folder, mirror.weights, progress=progress)
        for ref in run.record.assets:
            weights.write_file(folder / ref.name, run.read_asset(ref))
