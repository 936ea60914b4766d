"""The demo's result: `demo-report.json`, the table per version, and the proof."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stitch.demo.long_requests import LongAnswer
from stitch.demo.models import DEFAULT_MODEL
from stitch.demo.output import plain_console
from stitch.demo.settings import DemoSettings
from stitch.demo.watch import Commit
from stitch.records import Manifest


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What one replica's engine recomputed at the end."""

    id: str
    version: int
    digest: str
    joined: str
    """start, late or restarted."""
    killed: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that was seen, for the report. `steps` are the trainer's step events."""

    trainer_version: int
    trainer_digest: str
    base_digest: str
    proofs: tuple[Proof, ...]
    steps: tuple[Mapping[str, Any], ...]
    commits: tuple[Commit, ...]
    manifests: tuple[Manifest, ...]
    view_bytes: int
    long_answers: tuple[LongAnswer, ...]
    long_errors: tuple[str, ...]
    long_retried: int

    @property
    def bit_exact(self) -> bool:
        """Whether all replicas hold exactly what the trainer's own weights round to."""
        wanted = (self.trainer_version, self.trainer_digest)
        return bool(self.proofs) and all((p.version, p.digest) == wanted for p in self.proofs)


def write_report(
    path: Path, outcome: Outcome, settings: DemoSettings, *, seconds: float
) -> dict[str, Any]:
    """Write the report as JSON and return it."""
    report = {
        "bit_exact": outcome.bit_exact,
        "model": "tiny random llama" if settings.tiny else settings.model or DEFAULT_MODEL,
        "engine": settings.engine,
        "seconds": round(seconds, 1),
        "view_bytes": outcome.view_bytes,
        "trainer": {
            "version": outcome.trainer_version,
            "digest": outcome.trainer_digest,
            "base_digest": outcome.base_digest,
        },
        "replicas": [asdict(proof) for proof in outcome.proofs],
        "versions": version_rows(outcome),
        "versions_served": len(served_versions(outcome)),
        "requests": request_counts(outcome),
        "machine": machine(),
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def version_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """One row per published version. Times are of the slowest replica that took it in stride."""
    steps = {step["step"]: step for step in outcome.steps}
    rows = []
    for manifest in outcome.manifests:
        step = steps.get(manifest.step, {})
        commits = [c for c in outcome.commits if c.version == manifest.version and c.caught_up]
        patch_bytes = sum(blob.num_bytes for blob in manifest.blobs)
        rows.append(
            {
                "version": manifest.version,
                "step": manifest.step,
                "density": manifest.stats.density,
                "num_changed": manifest.stats.num_changed,
                "patch_bytes": patch_bytes,
                "share": patch_bytes / outcome.view_bytes,
                "stage_ms": _slowest(c.stage_ms for c in commits),
                "pause_ms": _slowest(c.pause_ms for c in commits),
                "publish_to_served_s": _slowest(c.publish_to_served_s for c in commits),
                "replicas": sorted(c.replica for c in commits),
                "reward": step.get("reward"),
                "accuracy": step.get("accuracy"),
                "loss": step.get("loss"),
                "samples_from": step.get("sample_versions", []),
                "step_s": step.get("seconds"),
            }
        )
    return rows


def served_versions(outcome: Outcome) -> set[int]:
    """Versions that at least one output token came from."""
    rollouts = {v for step in outcome.steps for v in step["sample_versions"]}
    return rollouts.union(*(answer.versions for answer in outcome.long_answers))


def request_counts(outcome: Outcome) -> dict[str, int]:
    """Rollout requests and long requests together. A failed rollout request ends the demo."""
    steps, answers = outcome.steps, outcome.long_answers
    rollouts = sum(step["requests"] for step in steps)
    spanning = sum(step["spanning"] for step in steps)
    return {
        "total": rollouts + len(answers) + len(outcome.long_errors),
        "rollouts": rollouts,
        "failed": len(outcome.long_errors),
        "retried": sum(step["retried"] for step in steps) + outcome.long_retried,
        "spanning_versions": spanning + sum(len(answer.versions) > 1 for answer in answers),
    }


def machine() -> dict[str, Any]:
    """Where it ran."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("stitch-rl", "torch", "transformers")},
    }


def print_report(report: Mapping[str, Any], path: Path, console: Console | None = None) -> None:
    """The table, the proof and a summary."""
    console = console or plain_console()
    console.print(_table(report["versions"]))
    for replica in report["replicas"]:
        equal = _proves(report, replica)
        note = {"late": ", joined late", "restarted": ", killed and restarted"}
        console.print(
            f"{'equal  ' if equal else 'DIFFERS'} {replica['id']} at version "
            f"{replica['version']}: {replica['digest']}{note.get(replica['joined'], '')}",
            markup=False,
        )
    trainer, requests = report["trainer"], report["requests"]
    console.print(f"trainer   at version {trainer['version']}: {trainer['digest']}", markup=False)
    console.print(
        f"bit-exact: {'yes' if report['bit_exact'] else 'NO'}; "
        f"{report['versions_served']} versions served; "
        f"{requests['total']} requests, {requests['failed']} failed, "
        f"{requests['retried']} retried, {requests['spanning_versions']} answers span versions; "
        f"{report['seconds']:.0f} s; report in {path}",
        markup=False,
    )


def _proves(report: Mapping[str, Any], replica: Mapping[str, Any]) -> bool:
    trainer = report["trainer"]
    return (replica["version"], replica["digest"]) == (trainer["version"], trainer["digest"])


def _table(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = (
        "version",
        "reward",
        "changed",
        "patch",
        "share",
        "stage",
        "pause",
        "served after",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["version"]),
            _number(row["reward"], "{:.3f}"),
            f"{row['density']:.3%}",
            _size(row["patch_bytes"]),
            f"{row['share']:.2%}",
            _number(row["stage_ms"], "{:.0f} ms"),
            _number(row["pause_ms"], "{:.1f} ms"),
            _number(row["publish_to_served_s"], "{:.2f} s"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"


def _slowest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
