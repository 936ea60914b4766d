"""`stitch inspect PATCH...`: what patch files say about themselves."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stitch.cli import exits, text
from stitch.cli.context import Context
from stitch.codec import PatchHeader, read_header
from stitch.codec.choice import needed_decode
from stitch.errors import CorruptPatchError, UnsupportedFormatError
from stitch.types import PatchStats

DESCRIPTION = """\
Show size, density, encodings and digests of a patch. Several files are taken as
the parts of one patch. Headers are checked; `stitch apply` proves the payloads."""


_READS: dict[object, str] = {
    "any": "whole buckets",
    "changed": "only the words that change",
    None: "what only a later release knows",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patches", metavar="PATCH", type=Path, nargs="+")
    parser.add_argument("--tensors", action="store_true", help="also count changes per tensor")


def run(args: argparse.Namespace, context: Context) -> int:
    parts = sorted((_read(path) for path in args.patches), key=lambda part: part[0].part)
    headers = [header for header, _ in parts]
    if len({(h.schema_digest, h.digest_before) for h in headers}) > 1:
        raise CorruptPatchError("these files are not parts of one patch: they start differently")
    stats = _total(parts)
    tensors = _per_tensor(headers) if args.tensors else None
    record: dict[str, object] = {
        "bytes": stats.num_bytes,
        "num_elements": stats.num_elements,
        "num_changed": stats.num_changed,
        "density": stats.density,
        "bits_per_changed_element": stats.bits_per_changed_element,
        "encodings": dict(stats.encodings),
        "decode": needed_decode(stats.encodings),
        "format": headers[0].format,
        "parts": [header.part for header in headers],
        "complete": _complete(headers),
        "schema_digest": headers[0].schema_digest,
        "digest_before": headers[0].digest_before,
        "digest_after": headers[-1].digest_after,
        "num_tensors": len(headers[0].schema) if headers[0].schema else None,
    }
    if tensors is not None:
        record["tensors"] = tensors
    context.console.result(record, _lines(record, tensors))
    return exits.OK


def _read(path: Path) -> tuple[PatchHeader, int]:
    data = path.read_bytes()
    try:
        return read_header(data), len(data)
    except (CorruptPatchError, UnsupportedFormatError) as error:
        raise type(error)(f"{path}: {error}") from None


def _total(parts: Sequence[tuple[PatchHeader, int]]) -> PatchStats:
    encodings: Counter[str] = Counter()
    for header, _ in parts:
        encodings.update(header.encodings)
    return PatchStats(
        num_elements=sum(header.num_elements for header, _ in parts),
        num_changed=sum(header.num_changed for header, _ in parts),
        num_bytes=sum(size for _, size in parts),
        encodings=dict(sorted(encodings.items())),
    )


def _complete(headers: Sequence[PatchHeader]) -> bool:
    """Whether all parts from 0 to the last one are here."""
    return headers[-1].last and [h.part for h in headers] == list(range(len(headers)))


def _per_tensor(headers: Sequence[PatchHeader]) -> list[dict[str, object]]:
    """Bytes and changes per tensor where the table tells: a bucket counts for its one tensor,
    or is listed under all the tensors that share it."""
    schema = next((h.schema for h in headers if h.schema), None)
    rows: dict[tuple[int, ...], list[int]] = {}
    for entry in (entry for header in headers for entry in header.buckets):
        key = tuple(sorted({piece.tensor for piece in entry.bucket.slices}))
        row = rows.setdefault(key, [0, 0, 0])
        row[0] += entry.bucket.num_elements
        row[1] += entry.num_changed
        row[2] += entry.num_bytes
    return [
        {
            "tensors": [schema.tensors[i].name if schema else i for i in key],
            "num_elements": elements,
            "num_changed": changed,
            "bytes": size,
        }
        for key, (elements, changed, size) in sorted(rows.items())
    ]


def _lines(record: dict[str, object], tensors: list[dict[str, object]] | None) -> list[str]:
    bits = record["bits_per_changed_element"]
    encodings = record["encodings"]
    assert isinstance(encodings, dict)
    lines = text.fields(
        [
            ("size", text.num_bytes(float(str(record["bytes"])))),
            ("elements", record["num_elements"]),
            ("changed", f"{record['num_changed']} ({text.percent(float(str(record['density'])))})"),
            ("bits per changed element", None if bits is None else f"{bits:.2f}"),
            ("encodings", ", ".join(f"{name} {n}" for name, n in encodings.items())),
            ("decoding reads", _READS[record["decode"]]),
            ("parts", f"{record['parts']}{'' if record['complete'] else ' (incomplete)'}"),
            ("schema", record["schema_digest"]),
            ("digest before", record["digest_before"]),
            ("digest after", record["digest_after"]),
        ]
    )
    if tensors is not None:
        rows = [
            [_names(row), row["num_elements"], row["num_changed"], row["bytes"]] for row in tensors
        ]
        lines += ["", *text.table(["tensors", "elements", "changed", "bytes"], rows)]
    return lines


def _names(row: dict[str, object]) -> str:
    names = row["tensors"]
    assert isinstance(names, list)
    return str(names[0]) if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
