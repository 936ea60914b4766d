"""What every verb gets: the console, and the board and run that the call is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stitch.cli.console import Console
from stitch.config import load, setting
from stitch.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from stitch.board import Board, Run

T = TypeVar("T")
MAX_DIGITS = 100
"""Python refuses to read very long numbers, with an error of its own."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """Settings that all verbs share; top-level keys of the file, and `STITCH_<NAME>`."""

    board: str | None = setting(None, help="the board: a directory or URL")
    run: str | None = setting(None, help="the run (default: the board's current one)")
    signing_key: Path | None = setting(  # noqa: RUF009 - a dataclass field, as in stitch.config
        None, help="private key (PEM) that signs what is written to the board"
    )
    trusted_keys: tuple[Path, ...] | None = setting(
        None,
        help="files of public keys (PEM), separated by commas: only what one of them signed is "
        "taken from the board",
    )


@dataclass(frozen=True, kw_only=True)
class Context:
    """One call of the program."""

    console: Console
    settings: CommonConfig
    config_file: Path | None
    rest: tuple[str, ...] = ()
    """What stood after `--`."""

    def load(self, cls: type[T], section: str, flags: Mapping[str, object]) -> T:
        """A verb's own configuration: file < environment < flags."""
        return load(cls, section, file=self.config_file, flags=flags)

    @property
    def board_address(self) -> str:
        if not self.settings.board:
            raise UsageError("no board is given: use --board or STITCH_BOARD")
        return self.settings.board

    @cached_property
    def board(self) -> Board:
        """The board, which must exist."""
        return self.open_board(create=False)

    def open_board(self, *, create: bool) -> Board:
        """The board, with the keys that were given."""
        from stitch.board import open_board

        return open_board(
            self.board_address,
            create=create,
            signing_key=self.settings.signing_key,
            trusted_keys=self.settings.trusted_keys,
        )

    @property
    def run_name(self) -> str:
        """The run that was named, else the board's current one."""
        if self.settings.run:
            return self.settings.run
        epoch = self.board.current_epoch()
        if epoch is None:
            raise RunNotFoundError(f"the board at {self.board.url} has no current run; give --run")
        return epoch.run

    @cached_property
    def run(self) -> Run:
        return self.board.open_run(self.run_name)


def parse_version(text: str, run: Run) -> int:
    """A published version from the command line: a number or `latest`."""
    from stitch.types import check_version

    if text == "latest":
        return run.newest()
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise UsageError(f"a version is a number or 'latest', got {text!r:.100}")
    version = check_version(int(text))
    run.digest(version)  # raises VersionNotFoundError
    return version
