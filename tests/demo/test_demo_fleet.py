"""Which processes the demo starts, and with what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.demo import fleet as fleet_module
from stitch.demo.fleet import Fleet
from stitch.demo.settings import CASTS, DemoSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """(name, arguments, environment) of what is started, instead of processes."""
    found: list[tuple[str, list[str], dict[str, str]]] = []

    def child(name: str, module: str, args: list[str], log: Path, environment: Any) -> Any:
        found.append((name, args, environment))
        return SimpleNamespace(name=name)

    monkeypatch.setattr(fleet_module, "Child", child)
    return found


def test_replicas_serve_with_the_chosen_engine(
    started: list[tuple[str, list[str], dict[str, str]]], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    settings = DemoSettings(tiny=True, engine="vllm", engine_python=python)
    Fleet(settings, tmp_path, tmp_path / "model").start_replica("r1")
    Fleet(DemoSettings(), tmp_path, tmp_path / "model").start_replica("r2")
    (_, vllm, environment), (_, embedded, plain) = started
    assert vllm[vllm.index("--engine") + 1] == "vllm"
    assert vllm[vllm.index("--engine-python") + 1] == str(python)
    assert "--enforce-eager" in vllm[vllm.index("--") :]
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert embedded[embedded.index("--engine") + 1] == "embedded"
    assert "--" not in embedded
    assert not any(name.startswith("VLLM") for name in plain)


@pytest.mark.parametrize("engine", CASTS)
def test_in_each_cast_others_serve_while_one_is_killed(
    engine: str, started: list[tuple[str, list[str], dict[str, str]]], tmp_path: Path
) -> None:
    cast = CASTS[engine]
    assert cast.killed in cast.early
    assert cast.late not in cast.early
    assert [cast.joined(name) for name in (cast.killed, cast.late)] == ["restarted", "late"]
    fleet = Fleet(DemoSettings(engine=engine), tmp_path, tmp_path / "model")
    fleet.start_trainer()
    assert fleet._plan(1).num_replicas == len(cast.early)
    assert fleet._plan(1).max_steps > fleet._plan(1).steps
