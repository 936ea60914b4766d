"""One loader: file < environment < flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from stitch.config import add_flags, load, setting
from stitch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sample:
    port: int = setting(0, help="port to listen on")
    share: float = setting(0.5, help="how much, in %")
    host: str = setting("127.0.0.1", help="address")
    loud: bool = setting(False, help="say more")
    folder: Path | None = setting(None, help="where")  # noqa: RUF009
    mode: Literal["a", "b"] = setting("a", help="which")
    tags: tuple[str, ...] = setting((), help="labels")
    token: str | None = setting(None, help="secret", secret=True)


@dataclass(frozen=True, kw_only=True)
class Needy:
    board: str = setting(help="the board")


def file_of(folder: Path, text: str) -> Path:
    file = folder / "stitch.toml"
    file.write_text(text)
    return file


def test_a_later_source_wins(tmp_path: Path) -> None:
    file = file_of(tmp_path, '[sample]\nport = 1\nhost = "file"\nshare = 2\nloud = true\n')
    environment = {"STITCH_SAMPLE_PORT": "2", "STITCH_SAMPLE_HOST": "environment"}
    flags = {"port": "3", "host": None}
    sample = load(Sample, "sample", file=file, environment=environment, flags=flags)
    assert sample == Sample(port=3, host="environment", share=2.0, loud=True)


def test_values_become_the_fields_types(tmp_path: Path) -> None:
    environment = {
        "STITCH_SAMPLE_FOLDER": "x/y",
        "STITCH_SAMPLE_TAGS": "one, two",
        "STITCH_SAMPLE_LOUD": "off",
        "STITCH_SAMPLE_MODE": "b",
        "STITCH_SAMPLE_SHARE": "0.25",
    }
    sample = load(Sample, "sample", environment=environment)
    assert sample == Sample(folder=Path("x/y"), tags=("one", "two"), mode="b", share=0.25)
    file = file_of(tmp_path, '[sample]\ntags = ["x"]\n')
    assert load(Sample, "sample", file=file, environment={}).tags == ("x",)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("PORT", "many", "STITCH_SAMPLE_PORT must be a whole number, got 'many'"),
        ("PORT", "1.5", "a whole number"),
        ("SHARE", "x", "a number"),
        ("LOUD", "perhaps", "true or false"),
        ("MODE", "c", "one of a, b"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_place(name: str, value: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        load(Sample, "sample", environment={f"STITCH_SAMPLE_{name}": value})


@pytest.mark.parametrize("line", ["port = true", "port = 1.5", "host = 3", "tags = 3"])
def test_files_are_checked_for_types_too(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"stitch\.toml: sample"):
        load(Sample, "sample", file=file_of(tmp_path, f"[sample]\n{line}\n"), environment={})


def test_unknown_settings_get_the_near_name(tmp_path: Path) -> None:
    file = file_of(tmp_path, "[sample]\nprot = 1\n")
    with pytest.raises(UsageError, match=r"\[sample\] has no setting 'prot'; did you mean 'port'"):
        load(Sample, "sample", file=file, environment={})
    with pytest.raises(UsageError, match="Sample has no setting"):
        load(Sample, "sample", environment={}, flags={"zzz": 1})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load(Sample, "sample", file=tmp_path / "none.toml", environment={})
    with pytest.raises(UsageError, match="not valid TOML"):
        load(Sample, "sample", file=file_of(tmp_path, "[["), environment={})
    with pytest.raises(UsageError, match="must be a table"):
        load(Sample, "sample", file=file_of(tmp_path, "sample = 1"), environment={})


def test_a_required_setting_says_how_to_give_it() -> None:
    with pytest.raises(UsageError, match=r"give --board, STITCH_NEEDY_BOARD or needy\.board"):
        load(Needy, "needy", environment={})
    assert load(Needy, "", environment={"STITCH_BOARD": "x"}).board == "x"


def test_flags_come_from_the_fields() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample, skip={"mode"})
    given = vars(parser.parse_args(["--port", "3", "--no-loud"]))
    assert "token" not in given
    assert "mode" not in given
    assert load(Sample, "sample", environment={}, flags=given) == Sample(port=3, loud=False)
    assert "port to listen on (default: 0)" in parser.format_help()
