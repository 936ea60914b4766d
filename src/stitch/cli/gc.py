"""`stitch gc`: remove from the board what a policy does not keep."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.cli import exits, text
from stitch.cli.context import Context
from stitch.config import add_flags, setting

if TYPE_CHECKING:
    from stitch.board.keeping.collect import Collected
    from stitch.board.keeping.retention import RetentionPlan, RetentionPolicy

DESCRIPTION = """\
Remove old patches, merged patches and anchors that nothing kept depends on. Without
--apply it only says what would go. Removal takes two calls: the first marks, one that
comes at least --grace-s later deletes what is marked and still of no use. Every version
that is kept stays reachable, from the base or an anchor and for every live replica;
manifests stay, so the log is never cut. To keep little, run `stitch compact` before."""


@dataclass(frozen=True, kw_only=True)
class GcConfig:
    """What to keep; the file's [gc] table, and `STITCH_GC_<NAME>`."""

    keep_versions: int = setting(256, help="newest versions to keep")
    keep_days: float | None = setting(None, help="keep all versions younger than this, too")
    keep_anchors: int | None = setting(None, help="newest anchors to keep (default: all)")
    keep: tuple[int, ...] = setting((), help="versions to keep reachable at any age: 100,200")
    replica_ttl_s: float = setting(
        900.0, help="age of a heartbeat at which its replica is taken for dead"
    )
    grace_s: float = setting(
        3600.0, help="time between marking and deleting, for readers under way"
    )

    def policy(self) -> RetentionPolicy:
        from stitch.board.keeping.retention import RetentionPolicy

        return RetentionPolicy(
            keep_versions=self.keep_versions,
            keep_days=self.keep_days,
            keep_anchors=self.keep_anchors,
            keep=frozenset(self.keep),
            replica_ttl_s=self.replica_ttl_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--apply", action="store_true", help="mark and delete, not only say so")
    add_flags(parser, GcConfig)


def run(args: argparse.Namespace, context: Context) -> int:
    from stitch.board.keeping.collect import Collected, Collector

    given = {name: getattr(args, name) for name in GcConfig.__dataclass_fields__}
    config = context.load(GcConfig, "gc", given)
    collector = Collector(context.run, config.policy(), grace_s=config.grace_s)
    done = collector.collect() if args.apply else Collected(plan=collector.look())
    context.console.result(_record(context.run.name, done, args.apply), _lines(done, args.apply))
    return exits.RETRYABLE if done.num_failed else exits.OK


def _record(run: str, done: Collected, applied: bool) -> dict[str, object]:
    plan = done.plan
    return {
        "run": run,
        "applied": applied,
        "newest": plan.newest,
        "first_kept": plan.first,
        "kept_besides": list(plan.kept_besides),
        "live_replicas": dict(plan.live),
        "garbage": {
            kind: {"objects": count, "bytes": num_bytes}
            for kind, count, num_bytes in _by_kind(plan)
        },
        "marked": done.num_marked,
        "waiting": done.num_waiting,
        "deleted": done.num_deleted,
        "deleted_bytes": done.deleted_bytes,
        "failed": done.num_failed,
    }


def _by_kind(plan: RetentionPlan) -> list[tuple[str, int, int]]:
    """(kind, objects, bytes) of the garbage."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for key, info in plan.garbage.items():
        name = key.rsplit("/", 1)[-1]
        kind = "anchors" if name.startswith("anchor") else "patches"
        kind = "merged patches" if name.startswith("from-") else kind
        counts[kind] += 1
        sizes[kind] += info.num_bytes
    return [(kind, counts[kind], sizes[kind]) for kind in sorted(counts)]


def _lines(done: Collected, applied: bool) -> list[str]:
    plan = done.plan
    lines = [f"versions {plan.first} to {plan.newest} are kept"]
    if plan.kept_besides:
        lines.append(f"besides {', '.join(map(str, plan.kept_besides))}")
    lines += [f"replica {name} at version {version} is not cut off" for name, version in plan.live]
    rows = [[kind, count, text.num_bytes(size)] for kind, count, size in _by_kind(plan)]
    if rows:
        lines += ["", *text.table(["of no use", "objects", "bytes"], rows), ""]
    if not applied:
        return [
            *lines,
            "nothing was changed; --apply marks and deletes" if rows else "nothing to do",
        ]
    lines.append(
        f"{text.count(done.num_marked, 'object')} marked, {done.num_waiting} still to wait, "
        f"{done.num_deleted} deleted ({text.num_bytes(done.deleted_bytes)})"
    )
    if done.num_failed:
        lines.append(f"{done.num_failed} could not be deleted; the next call tries again")
    return lines
