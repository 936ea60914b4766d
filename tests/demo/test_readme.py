"""The README's trainer and replica, run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch.board import open_board
from stitch.demo.tiny_model import write_tiny_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the README's trainer and a base model of the name it uses."""
    write_tiny_model(tmp_path / "base-model")
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "trainer.py").write_text(program, encoding="utf-8")
    return tmp_path


@pytest.fixture
def replica(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The README's `stitch serve`, on a free port."""
    (line,) = re.findall(r"^stitch (serve .*)$", README, re.MULTILINE)
    command = [sys.executable, "-m", "stitch.cli", *shlex.split(line.replace("8001", "0"))]
    with (place / "replica.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log)
    yield process
    process.terminate()
    process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_of_the_readme_learns_from_the_replica_of_the_readme(
    place: Path, replica: subprocess.Popen[bytes]
) -> None:
    done = subprocess.run(
        [sys.executable, "trainer.py"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    log = (place / "replica.log").read_text()[-3000:]
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[-1] for line in lines] == [f"sums@{step}" for step in range(1, 9)]
    assert all(
        step - 2 <= int(start) <= int(end)
        for step, start, end in ((int(line[0]), line[1], line[2]) for line in lines)
    )
    assert open_board(place / "board", create=False).open_run("sums").newest() == 8
    assert replica.poll() is None


def test_the_readme_links_to_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target


def test_the_readme_names_every_command() -> None:
    from stitch.cli.registry import VERBS

    table = README.partition("## Command line")[2].partition("## Documents")[0]
    for verb in VERBS:
        assert re.search(rf"`(stitch )?{verb}\b", table), verb
