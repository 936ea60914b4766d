"""`stitch diff OLD NEW --out FILE`: the patch from one checkpoint to another."""

from __future__ import annotations

import argparse
from pathlib import Path

from stitch.cli import exits, flags, text, weights
from stitch.cli.context import Context
from stitch.config import add_flags

DESCRIPTION = """\
Write the lossless patch that turns OLD into NEW. Both are safetensors files or
checkpoint directories with the same tensors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", type=Path)
    parser.add_argument("new", metavar="NEW", type=Path)
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="patch to write")
    add_flags(parser, flags.EncodingConfig)
    weights.add_view_flag(parser)
    flags.add_threads_flag(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.codec import encode_patch, read_header

    given = {"encoding": args.encoding, "decode": args.decode}
    config = context.load(flags.EncodingConfig, "diff", given)
    with weights.opened(args.old, args.view) as old, weights.opened(args.new, args.view) as new:
        weights.check_same_tensors(old.reader.schema, new.reader.schema, "OLD", "NEW")
        weights.refuse_overwriting(
            args.out, *old.checkpoint.files, *new.checkpoint.files, args.old, args.new
        )
        with context.console.progress("comparing") as progress:
            data, stats = encode_patch(
                old.reader,
                new.reader,
                encoding=config.encoding,
                decode=config.decode,
                threads=args.threads,
                progress=progress,
            )
    weights.write_file(args.out, data)
    header = read_header(data)
    record = {
        "out": str(args.out),
        "bytes": stats.num_bytes,
        "num_elements": stats.num_elements,
        "num_changed": stats.num_changed,
        "density": stats.density,
        "bits_per_changed_element": stats.bits_per_changed_element,
        "encodings": dict(stats.encodings),
        "digest_before": header.digest_before,
        "digest_after": header.digest_after,
    }
    context.console.result(
        record,
        f"{args.out}: {text.num_bytes(stats.num_bytes)}, "
        f"{stats.num_changed} of {stats.num_elements} elements changed "
        f"({text.percent(stats.density)}), digest {header.digest_after}",
    )
    return exits.OK
