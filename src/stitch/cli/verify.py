"""`stitch verify`: prove that a checkpoint, or what replicas serve, is a version of the run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stitch.cli import exits, flags, text, weights
from stitch.cli.context import Context, parse_version
from stitch.cli.http import post_json
from stitch.errors import StitchError, UsageError

if TYPE_CHECKING:
    from stitch.board import Run

DESCRIPTION = """\
Recompute digests and compare them with the board's. Either of a checkpoint (read in
the run's view), or of the weights that replicas' engines really hold. Exits with 1
if anything differs."""

MAX_SEARCHED = 1000
"""Versions looked through to say which one an unequal checkpoint is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, nargs="?")
    parser.add_argument(
        "--version",
        metavar="N",
        dest="version",
        default="latest",
        help="version that the checkpoint should be (default: latest)",
    )
    parser.add_argument(
        "--replica",
        metavar="URL",
        action="append",
        default=[],
        help="replica to verify; repeatable",
    )
    parser.add_argument(
        "--replicas", action="store_true", help="verify every replica that the board lists"
    )
    parser.add_argument("--admin-token-file", metavar="FILE", type=Path, help="for remote replicas")
    parser.add_argument(
        "--timeout-s",
        type=flags.seconds,
        default=600.0,
        metavar="S",
        help="for one replica (default: 600)",
    )
    flags.add_threads_flag(parser)


def run(args: argparse.Namespace, context: Context) -> int:
    of_replicas = bool(args.replicas or args.replica)
    if (args.checkpoint is not None) == of_replicas:
        raise UsageError("give either a CHECKPOINT, or --replicas or --replica URL")
    return _replicas(args, context) if of_replicas else _checkpoint(args, context)


def _checkpoint(args: argparse.Namespace, context: Context) -> int:
    run = context.run
    version = parse_version(args.version, run)
    expected = run.digest(version)
    with weights.opened(args.checkpoint, run.record.view) as opened:
        problems = weights.schema_differences(run.schema, opened.reader.schema)
        found = None
        if not problems:
            state = weights.digest_of(opened.reader, context.console, "reading", args.threads)
            found = state.version_digest()
    equal = found == expected
    record: dict[str, object] = {
        "equal": equal,
        "run": run.name,
        "version": version,
        "expected": expected,
        "found": found,
        "differences": problems,
    }
    if equal:
        context.console.result(record, f"equal: {args.checkpoint} is {run.name}@{version}, {found}")
        return exits.OK
    record["found_version"] = other = None if found is None else _version_with(run, found)
    line = f"unequal: {args.checkpoint} is not {run.name}@{version}: "
    if problems:
        line += f"other tensors than the run's: {'; '.join(problems)}"
    else:
        line += f"expected digest {expected}, found {found}"
        line += f", which is version {other}" if other is not None else ", no recent version's"
    context.console.result(record, line)
    return exits.UNEQUAL


def _version_with(run: Run, digest: str) -> int | None:
    """The newest version with this digest, among the last ones and the base."""
    newest = run.newest()
    for version in range(newest, max(0, newest - MAX_SEARCHED), -1):
        if run.manifest(version).digest_after == digest:
            return version
    return 0 if digest == run.record.base_digest else None


def _replicas(args: argparse.Namespace, context: Context) -> int:
    run = context.run
    addresses = {url: url for url in args.replica}
    if args.replicas:
        addresses |= {beat.replica: beat.url for beat in run.heartbeats()}
    token = args.admin_token_file.read_text().strip() if args.admin_token_file else None
    rows = []
    codes = {exits.OK}
    for name, url in addresses.items():
        try:
            rows.append(_verify_replica(run, name, url, token, args.timeout_s))
        except StitchError as error:
            codes.add(exits.code_for(error))
            rows.append({"replica": name, "url": url, "equal": False, "error": str(error)})
    if not rows:
        raise UsageError(f"the board lists no replica of run {run.name!r}")
    equal = all(row["equal"] for row in rows)
    record = {"equal": equal, "run": run.name, "newest": run.newest(), "replicas": rows}
    context.console.result(record, text.table(["replica", "version", "", "digest"], _table(rows)))
    if any(not row["equal"] and "error" not in row for row in rows):
        return exits.UNEQUAL
    return max(codes)


def _verify_replica(
    run: Run, name: str, url: str, token: str | None, timeout_s: float
) -> dict[str, Any]:
    """Let the engine recompute; compare with the board here, not with what the replica thinks."""
    reply = post_json(url.rstrip("/") + "/verify", token=token, timeout_s=timeout_s)
    version, digest = reply.get("version"), reply.get("digest")
    if reply.get("run") != run.name or not isinstance(version, int):
        raise UsageError(f"{url} serves {reply.get('run')}@{version}, not run {run.name!r}")
    expected = run.digest(version)
    return {
        "replica": name,
        "url": url,
        "version": version,
        "equal": digest == expected,
        "expected": expected,
        "found": digest,
        "seconds_s": reply.get("seconds_s"),
    }


def _table(rows: list[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            row["replica"],
            row.get("version"),
            "failed" if "error" in row else "equal" if row["equal"] else "UNEQUAL",
            _digests(row),
        ]
        for row in rows
    ]


def _digests(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    return str(row["found"]) + ("" if row["equal"] else f", expected {row['expected']}")
