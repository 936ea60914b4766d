"""Strict JSON: how the records of a board are written and read. Standard library only.

Writing sorts the keys and leaves out blanks, so equal records have equal bytes. Reading checks
presence, type and range of every field; what is wrong raises CorruptRecordError with the record's
key and the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stitch.errors import CorruptRecordError, UnsupportedFormatError, UsageError
from stitch.types import MAX_VERSION, check_run_name, is_http_address

MAX_INTEGER = 2**63 - 1
MAX_TEXT = 10_000
"""Longest text field, in characters."""

T = TypeVar("T")


def canonical_json(value: object) -> bytes:
    """Compact ASCII JSON with sorted keys; NaN and infinities raise ValueError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def load_json(data: bytes, key: str) -> object:
    """The JSON value in `data`. CorruptRecordError for anything that is not strict UTF-8 JSON."""
    if not data.strip(b"\0"):
        raise CorruptRecordError(f"{key}: {len(data)} bytes, empty or all zero, wanted JSON")
    try:
        return strict_loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptRecordError(f"{key}: not valid JSON ({str(error)[:200]})") from None


def strict_loads(text: str) -> Any:
    """The JSON value in `text`. ValueError or RecursionError, also for repeated fields and NaN."""
    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a field occurs twice")
    return names


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object; `path` leads to it inside the record at `key`."""

    values: dict[str, Any]
    key: str
    path: str = ""

    @classmethod
    def of_record(cls, data: bytes, key: str, known_format: int) -> Fields:
        """The fields of the record `data`. UnsupportedFormatError if a newer release wrote it."""
        values = load_json(data, key)
        if not isinstance(values, dict):
            raise CorruptRecordError(f"{key}: holds a {type(values).__name__}, wanted an object")
        fields = cls(values, key)
        found = fields.integer("format", low=1)
        if found > known_format:
            raise UnsupportedFormatError(
                f"{key}: format {found}, but this release knows formats up to {known_format}"
            )
        return fields

    def error(self, name: str, problem: str) -> CorruptRecordError:
        return CorruptRecordError(f"{self.key}: field {self.path}{name} {problem}")

    def _get(self, name: str, kind: type[T], wanted: str) -> T:
        if name not in self.values:
            raise self.error(name, "is missing")
        value = self.values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"is {value!r:.100}, wanted {wanted}")
        return value

    def text(self, name: str, *, pattern: re.Pattern[str] | None = None) -> str:
        value = self._get(name, str, "a text")
        if len(value) > MAX_TEXT or (pattern is not None and not pattern.fullmatch(value)):
            raise self.error(name, f"is {value!r:.100}, which is not allowed")
        return value

    def hexadecimal(self, name: str, *, digits: int = 32) -> str:
        value = self._get(name, str, f"{digits} hexadecimal digits")
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise self.error(name, f"is {value!r:.100}, wanted {digits} hexadecimal digits")
        return value

    def http_address(self, name: str) -> str:
        value = self.text(name)
        if not is_http_address(value):
            raise self.error(name, f"is {value!r:.100}, wanted a plain http(s) address")
        return value

    def run_name(self, name: str) -> str:
        value = self.text(name)
        try:
            return check_run_name(value)
        except UsageError as error:
            raise self.error(name, f"is wrong: {error}") from None

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self._get(name, int, "an integer")
        if not low <= value <= high:
            raise self.error(name, f"is {value}, wanted {low} to {high}")
        return value

    def version(self, name: str, *, low: int = 0) -> int:
        return self.integer(name, low=low, high=MAX_VERSION)

    def number(self, name: str) -> float:
        if isinstance(self.values.get(name), int):
            return float(self.integer(name, low=-MAX_INTEGER))
        value = self._get(name, float, "a number")
        if not math.isfinite(value):
            raise self.error(name, "is not finite")
        return value

    def boolean(self, name: str) -> bool:
        return self._get(name, bool, "true or false")

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value not in allowed:
            raise self.error(name, f"is {value!r:.100}, wanted one of {', '.join(allowed)}")
        return value

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """`read(name)`, or None where the field is present and null."""
        if name in self.values and self.values[name] is None:
            return None
        return read(name)

    def child(self, name: str) -> Fields:
        return Fields(self._get(name, dict, "an object"), self.key, f"{self.path}{name}.")

    def children(self, name: str, at_most: int = 100_000) -> list[Fields]:
        """The objects in a list field."""
        values = self._get(name, list, "a list")
        if len(values) > at_most:
            raise self.error(name, f"has {len(values)} entries, wanted at most {at_most}")
        found = []
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{name}[{index}]", f"is {value!r:.100}, wanted an object")
            found.append(Fields(value, self.key, f"{self.path}{name}[{index}]."))
        return found

    def items(
        self, name: str, kind: type[T], is_allowed: Callable[[T], bool], wanted: str
    ) -> tuple[T, ...]:
        """The texts or integers in a list field, each of which must be allowed."""
        values = self._get(name, list, "a list")
        for index, value in enumerate(values):
            if not isinstance(value, kind) or isinstance(value, bool) or not is_allowed(value):
                raise self.error(f"{name}[{index}]", f"is {value!r:.100}, wanted {wanted}")
        return tuple(values)

    def integers(self) -> dict[str, int]:
        """All fields, each of which must be a non-negative integer."""
        return {name: self.integer(name) for name in self.values}

    def numbers(self) -> dict[str, int | float | None]:
        """All fields, each of which must be a number or null."""
        for name, value in self.values.items():
            if value is not None:
                self.number(name)
        return dict(self.values)
