"""`stitch apply BASE PATCH... --out DIR`: a checkpoint with patches applied, proven."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli import exits, flags, text, weights
from stitch.cli.console import Console
from stitch.cli.context import Context
from stitch.codec import DigestState, PatchedReader, UpdateSet
from stitch.tensors import WeightReader

DESCRIPTION = """\
Apply patches, in order, to BASE (a safetensors file or checkpoint directory) and
write the result: to a file if --out ends in .safetensors, else to a directory;
the small files beside BASE's weights come along. A patch for other weights is
refused before anything is written. Giving BASE as --out replaces it in one step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", type=Path)
    parser.add_argument("patches", metavar="PATCH", type=Path, nargs="+")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the result back to prove its digest"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a directory that is not empty"
    )
    weights.add_view_flag(parser)
    flags.add_threads_flag(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    console = context.console
    with weights.opened(args.base, args.view) as base:
        state = weights.digest_of(base.reader, console, "reading BASE", args.threads)
        update, after = _decode(args.patches, base.reader, state, args.threads)
        result = PatchedReader(base.reader, update)
        _write(args, base, result, console)
    digest = after.version_digest()
    if not args.no_verify:
        weights.prove(args.out, digest, console, args.threads)
    record = {
        "out": str(args.out),
        "num_changed": update.num_changed,
        "digest_before": state.version_digest(),
        "digest_after": digest,
        "verified": not args.no_verify,
    }
    proof = "not read back" if args.no_verify else "read back and proven"
    console.result(
        record,
        f"{args.out}: {text.count(update.num_changed, 'element')} changed by "
        f"{text.count(len(args.patches), 'patch file')}, digest {digest} ({proof})",
    )
    return exits.OK


def _decode(
    paths: list[Path], base: WeightReader, state: DigestState, threads: int | None
) -> tuple[UpdateSet, DigestState]:
    """The composed update set of all patches. Any that does not fit raises, naming its file."""
    from stitch.codec import decode_parts
    from stitch.errors import BaseMismatchError, CorruptPatchError, UnsupportedFormatError

    update = UpdateSet([])
    for path in paths:
        try:
            found, state = decode_parts(
                [path.read_bytes()], PatchedReader(base, update), state, threads=threads
            )
        except (BaseMismatchError, CorruptPatchError, UnsupportedFormatError) as error:
            raise type(error)(f"{path}: {error}") from error
        update = UpdateSet.compose([update, found])
    return update, state


def _write(
    args: argparse.Namespace, base: weights.Opened, result: WeightReader, console: Console
) -> None:
    from stitch.tensors import write_checkpoint, write_safetensors

    source: Path = base.checkpoint.path
    in_place = args.out.exists() and source.exists() and args.out.samefile(source)
    with console.progress("writing") as progress:
        if args.out.suffix == ".safetensors":
            metadata = base.checkpoint.metadata or None
            write_safetensors(args.out, result, metadata=metadata, progress=progress)
            return
        write_checkpoint(
            args.out,
            result,
            assets_from=base.checkpoint,
            overwrite=args.overwrite or in_place,
            progress=progress,
        )
