"""One loader for every configuration: TOML file < environment < flags.

A configuration is a frozen, keyword-only dataclass whose fields are written once, with
:func:`setting`: name, type, default and help. From that one place come the key in the file
(`[client]` / `deadline_s`), the variable (`STITCH_CLIENT_DEADLINE_S`) and the flag
(`--deadline-s`). Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stitch.errors import UsageError

T = TypeVar("T")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def setting(default: Any = dataclasses.MISSING, *, help: str, secret: bool = False) -> Any:
    """A dataclass field that explains itself. `secret` values never become flags or messages."""
    metadata = {"help": help, "secret": secret}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load(
    cls: type[T],
    section: str,
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> T:
    """Build `cls` from the table `[section]` of `file`, then `STITCH_*`, then `flags`.

    Section "" stands for the keys outside any table, and for `STITCH_<FIELD>`. A later source
    wins. A flag that is None counts as not given. Unknown keys in the file or in `flags`, missing
    required fields and values of the wrong type raise UsageError.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = {}
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if file is not None:
        table = _table(Path(file), section)
        _refuse_unknown(table, names, f"{file}: [{section}]")
        for name, value in table.items():
            values[name] = convert(value, hints[name], f"{file}: {section}.{name}")
    for name in names:
        variable = variable_name(section, name)
        if variable in environment:
            values[name] = convert(environment[variable], hints[name], variable)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(given, names, cls.__name__)
    for name, value in given.items():
        values[name] = convert(value, hints[name], name)
    _refuse_missing(cls, section, values)
    return cls(**values)


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    *,
    skip: Collection[str] = (),
    aliases: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """One `--flag` per field of `cls`; its default is None, so that :func:`load` sees what was
    given. Fields in `skip`, and secrets, get none. `aliases`: field -> a shorter flag."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip or field.metadata.get("secret"):
            continue
        flags = ["--" + field.name.replace("_", "-")]
        if field.name in aliases:
            flags.insert(0, aliases[field.name])
        help_text = _help(field)
        if _plain(hints[field.name]) is bool:
            parser.add_argument(
                *flags,
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=help_text,
            )
        else:
            parser.add_argument(
                *flags, dest=field.name, help=help_text, metavar=_metavar(field.name)
            )


def variable_name(section: str, field: str) -> str:
    """`STITCH_CLIENT_DEADLINE_S` for field `deadline_s` of section `client`."""
    return "_".join(part.upper() for part in ("stitch", section, field) if part)


def convert(value: object, hint: Any, where: str) -> Any:
    """`value` as the type `hint` names; UsageError says where it stood and what was wanted.

    Knows str, int, float, bool, Path, Literal, `X | None` and `tuple[X, ...]` (a list in the
    file, comma-separated elsewhere).
    """
    plain = _plain(hint)
    if value is None and plain is not hint:
        return None
    if typing.get_origin(plain) is tuple:
        item = typing.get_args(plain)[0]
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise _wrong(value, "a list", where)
        return tuple(convert(p.strip() if isinstance(p, str) else p, item, where) for p in parts)
    if typing.get_origin(plain) is typing.Literal:
        choices = typing.get_args(plain)
        if value not in choices:
            raise _wrong(value, "one of " + ", ".join(map(str, choices)), where)
        return value
    if plain is bool:
        return _bool(value, where)
    if plain in (int, float):
        return _number(value, plain, where)
    if plain is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if plain is str and not isinstance(value, str):
        raise _wrong(value, "text", where)
    return value


def _bool(value: object, where: str) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise _wrong(value, "true or false", where)


def _number(value: object, kind: type, where: str) -> Any:
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise _wrong(value, wanted, where)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise _wrong(value, wanted, where) from None


def _wrong(value: object, wanted: str, where: str) -> UsageError:
    return UsageError(f"{where} must be {wanted}, got {value!r:.100}")


def _plain(hint: Any) -> Any:
    """`X` of `X | None`, else the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _table(file: Path, section: str) -> Mapping[str, object]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"configuration file {file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"configuration file {file} is not valid TOML: {error}") from None
    if not section:
        return {name: value for name, value in document.items() if not isinstance(value, dict)}
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"{file}: [{section}] must be a table, got {table!r:.100}")
    return table


def _refuse_unknown(given: Mapping[str, object], known: list[str], where: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise UsageError(f"{where} has no setting {name!r}{hint}")


def _refuse_missing(cls: type, section: str, values: Mapping[str, object]) -> None:
    for field in dataclasses.fields(cls):
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not optional and field.name not in values:
            raise UsageError(
                f"{field.name} is not set: give --{field.name.replace('_', '-')}, "
                f"{variable_name(section, field.name)} or {section}.{field.name} in the file"
            )


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", ""))
    if field.default not in (dataclasses.MISSING, None, ""):
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _metavar(name: str) -> str:
    return name.rsplit("_", 1)[-1].upper()
