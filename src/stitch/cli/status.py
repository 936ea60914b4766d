"""`stitch status`: versions, replicas and their lag."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stitch.cli import exits, flags, text
from stitch.cli.context import Context
from stitch.errors import UsageError

if TYPE_CHECKING:
    from stitch.board import Run
    from stitch.records import Heartbeat

DESCRIPTION = """\
Show the run's newest version and every replica: what it serves, how far behind it
is, its state and its last error. The age of a heartbeat compares two hosts' clocks,
so it is only a hint; with --watch, a heartbeat that stands still is marked."""
STILL_AFTER_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=flags.seconds,
        const=2.0,
        metavar="S",
        help="show it again every S seconds (default: 2) until interrupted",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    if args.watch is None:
        record = status_of(context, context.run, {})
        context.console.result(record, _lines(record))
        return exits.OK
    if context.console.as_json:
        raise UsageError("--watch shows a page again and again; --json prints one object")
    _watch(args.watch, context)
    return exits.OK


def _watch(every_s: float, context: Context) -> None:
    pulse = Pulse()
    pause = threading.Event()
    while True:
        run = context.board.open_run(context.run_name)
        still_s = pulse.still_s(run.heartbeats(), time.monotonic())
        lines = _lines(status_of(context, run, still_s))
        clear = "\x1b[2J\x1b[H" if sys.stdout.isatty() else ""
        context.console.result({}, clear + "\n".join(lines))
        if context.console.closed:
            return
        pause.wait(every_s)


class Pulse:
    """For how long each heartbeat has stood still, on this host's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}

    def still_s(self, beats: list[Heartbeat], now_s: float) -> dict[str, float]:
        for beat in beats:
            mark = (beat.boot, beat.seq)
            if beat.replica not in self._seen or self._seen[beat.replica][0] != mark:
                self._seen[beat.replica] = (mark, now_s)
        return {beat.replica: now_s - self._seen[beat.replica][1] for beat in beats}


def status_of(context: Context, run: Run, still_s: Mapping[str, float]) -> dict[str, Any]:
    """Everything the page shows."""
    newest = run.newest()
    manifest = run.manifest(newest) if newest else None
    epoch = context.board.current_epoch()
    created_unix_s = manifest.created_unix_s if manifest else run.record.created_unix_s
    return {
        "board": context.board.url,
        "run": run.name,
        "current": epoch is not None and epoch.run == run.name,
        "epoch": None if epoch is None else epoch.epoch,
        "view": run.record.view,
        "view_bytes": run.record.num_bytes,
        "base": run.record.base,
        "newest": newest,
        "step": manifest.step if manifest else None,
        "digest": run.digest(newest),
        "created_unix_s": created_unix_s,
        "anchors": run.anchors(),
        "replicas": [_replica(beat, newest, still_s) for beat in run.heartbeats()],
    }


def _replica(beat: Heartbeat, newest: int, still_s: Mapping[str, float]) -> dict[str, Any]:
    return {
        "replica": beat.replica,
        "url": beat.url,
        "region": beat.region,
        "state": beat.state.value,
        "applied": beat.applied,
        "lag": None if beat.applied is None else max(0, newest - beat.applied),
        "ready": beat.ready,
        "reason": beat.reason,
        "last_error": beat.last_error,
        "beat_age_s": round(time.time() - beat.sent_unix_s, 1),
        "still_s": still_s.get(beat.replica),
        "boot": beat.boot,
        "versions": [dict(row) for row in beat.versions],
    }


def _lines(record: Mapping[str, Any]) -> list[str]:
    current = "" if record["current"] else " (not the board's current run)"
    lines = text.fields(
        [
            ("board", record["board"]),
            ("run", f"{record['run']}{current}"),
            ("newest", f"version {record['newest']}, {text.utc(record['created_unix_s'])} UTC"),
            ("view", f"{record['view']}, {text.num_bytes(record['view_bytes'])}"),
            ("anchors", ", ".join(map(str, record["anchors"])) or "none"),
        ]
    )
    replicas = record["replicas"]
    if not replicas:
        return [*lines, "", "no replicas"]
    header = ["replica", "state", "version", "lag", "ready", "beat", "url", "note"]
    return [*lines, "", *text.table(header, [_row(replica) for replica in replicas])]


def _row(replica: Mapping[str, Any]) -> list[object]:
    still_s = replica["still_s"]
    lost = still_s is not None and still_s > STILL_AFTER_S
    note = replica["last_error"] or ("" if replica["ready"] else replica["reason"])
    return [
        replica["replica"],
        "LOST" if lost else replica["state"],
        replica["applied"],
        replica["lag"],
        "yes" if replica["ready"] and not lost else "no",
        f"{replica['beat_age_s']:.0f} s ago",
        replica["url"],
        note,
    ]
