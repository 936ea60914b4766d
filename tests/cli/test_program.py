"""The program as a whole: help, exit codes, errors, output."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import Program

from stitch.cli import exits, registry, text
from stitch.cli.console import Console
from stitch.cli.registry import VERBS
from stitch.errors import (
    CorruptBlobError,
    EngineUnreachableError,
    FatalReplicaError,
    PublishConflictError,
    UsageError,
)

HEAVY = ("numpy", "torch", "aiohttp", "numba", "rich", "obstore", "transformers")


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from stitch.cli.main import main; main(sys.argv[1:]); "
        f"heavy = set({HEAVY!r}) & set(sys.modules); sys.exit(9 if heavy else 0)"
    )
    result = python(code, *arguments)
    assert result.returncode == 0, result.stderr


def test_a_commands_help_imports_no_engine_and_no_compiler() -> None:
    code = (
        "import sys; from stitch.cli.main import main; from stitch.cli.registry import VERBS\n"
        "for verb in VERBS: main([verb, '--help'])\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'numba', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_help_lists_every_command_and_exit_code(stitch: Program) -> None:
    outcome = stitch("--help")
    assert outcome.code == 0
    for verb, (_, summary) in VERBS.items():
        assert f"  {verb} " in outcome.out
        assert summary in outcome.out
    for code in ("0", "1", "2", "3", "4", "130"):
        assert f"\n  {code} " in outcome.out


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_command_explains_itself_and_its_exit_codes(stitch: Program, verb: str) -> None:
    outcome = stitch(verb, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: stitch {verb}")
    assert "--json" in outcome.out
    assert "exit codes:" in outcome.out


def test_version_prints_the_release(stitch: Program) -> None:
    outcome = stitch("--version")
    assert (outcome.code, outcome.out) == (0, "stitch 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no command is given"),
        (["sho"], "did you mean 'show'?"),
        (["log", "--cuont", "3"], "unrecognized arguments: --cuont 3 (see `stitch log --help`)"),
        (["diff", "a", "b"], "the following arguments are required: --out"),
        (["log", "-n", "0"], "must be at least 1, got 0"),
        (["log"], "no board is given: use --board or STITCH_BOARD"),
        (["log", "--board", "/nonexistent/board"], "/nonexistent/board"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(
    stitch: Program, arguments: list[str], words: str
) -> None:
    assert words in stitch.fails(exits.USAGE, *arguments)


def test_with_json_an_error_is_one_object(stitch: Program) -> None:
    outcome = stitch("log", "--json")
    assert outcome.code == exits.USAGE
    assert outcome.json["error"]["type"] == "UsageError"
    assert "no board is given" in outcome.json["error"]["message"]


def test_json_may_stand_before_the_command(stitch: Program) -> None:
    assert stitch("--json", "log").json["error"]["type"] == "UsageError"


def test_verbose_shows_where_an_error_came_from(stitch: Program) -> None:
    outcome = stitch("log", "-v")
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: no board")


def test_missing_files_are_named(stitch: Program, tmp_path: Path) -> None:
    line = stitch.fails(exits.USAGE, "inspect", tmp_path / "none.patch")
    assert "none.patch: No such file or directory" in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (FileNotFoundError(2, "missing", "x"), 2),
        (CorruptBlobError("x"), 3),
        (EngineUnreachableError("x"), 3),
        (TimeoutError("x"), 3),
        (PublishConflictError("x"), 4),
        (FatalReplicaError("x"), 4),
        (RuntimeError("x"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_follow_the_error_tree(
    stitch: Program, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def load_verb(name: str) -> None:
        raise error

    monkeypatch.setattr("stitch.cli.main.load_verb", load_verb)
    stitch.fails(code, "log")


def test_a_defect_is_called_one(stitch: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_verb(name: str) -> registry.Verb:
        raise KeyError("x")

    monkeypatch.setattr("stitch.cli.main.load_verb", load_verb)
    assert "KeyError: 'x' (this is a defect" in stitch.fails(exits.FATAL, "log")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Terminal()
    monkeypatch.setattr(sys, "stderr", watched)
    with Console(as_json=False, verbose=False).progress("reading") as progress:
        assert progress is not None
        progress(5, 10)
        progress(10, 10)
    assert "reading" in watched.getvalue()
    with Console(as_json=True, verbose=False).progress("reading") as progress:
        assert progress is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Console(as_json=False, verbose=False).progress("reading") as progress:
        assert progress is None
    assert sys.stderr.getvalue() == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys; from stitch.cli.console import Console; "
        "c = Console(as_json=False, verbose=False); "
        "[c.result({}, 'x' * 70000) for _ in range(9)]; sys.exit(7 if c.closed else 8)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=60) == 7
    assert process.stderr.read() == ""
    process.stderr.close()


def test_board_and_run_come_from_file_environment_and_flags(
    stitch: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stitch.toml"
    file.write_text('board = "/nonexistent/from-file"\n')
    assert "from-file" in stitch.fails(2, "log", "--config", file)
    monkeypatch.setenv("STITCH_BOARD", "/nonexistent/from-environment")
    assert "from-environment" in stitch.fails(2, "log", "--config", file)
    assert "from-flag" in stitch.fails(2, "log", "--board", "/nonexistent/from-flag")
    assert "before" in stitch.fails(2, "--board", "/nonexistent/before", "log")
    file.write_text("bord = 1\n")
    assert "did you mean 'board'" in stitch.fails(2, "log", "--config", file)


def test_the_module_runs_as_the_program_does() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "stitch.cli", "log", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "STITCH_BOARD"},
    )
    assert result.returncode == exits.USAGE
    assert json.loads(result.stdout)["error"]["type"] == "UsageError"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (270e9, "270 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_are_shown_with_three_digits(count: float, shown: str) -> None:
    assert text.num_bytes(count) == shown


def test_tables_align_numbers_to_the_right_and_text_to_the_left() -> None:
    rows = [[1, "a", None], [100, "long", "x"]]
    assert text.table(["n", "name", "note"], rows) == [
        "  n  name  note",
        "  1  a     -",
        "100  long  x",
    ]
    assert text.table(["n"], []) == ["n"]
