"""JSON from untrusted bytes: no repeated keys, no surprises, every field checked by kind."""

from __future__ import annotations

import re
from typing import Any

from stitch.errors import CorruptPatchError
from stitch.strict_json import strict_loads

_HEX = re.compile(r"[0-9a-f]*")


def parse_json(data: bytes, what: str) -> Any:
    """The value of ASCII JSON, or CorruptPatchError."""
    try:
        return strict_loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CorruptPatchError(f"{what}: not the expected JSON: {error}") from None


def check_keys(value: object, keys: set[str], optional: set[str], what: str) -> dict[str, Any]:
    """`value` as an object with exactly these keys (and perhaps some `optional` ones)."""
    if not isinstance(value, dict):
        raise CorruptPatchError(f"{what} must be an object, got {value!r:.80}")
    if not keys <= value.keys() <= keys | optional:
        raise CorruptPatchError(f"{what} has keys {sorted(value)!r:.200}, expected {sorted(keys)}")
    return value


def check_int(value: object, what: str, maximum: int) -> int:
    """`value` as an integer in 0..maximum."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
        raise CorruptPatchError(f"{what} must be an integer in 0..{maximum}, got {value!r:.80}")
    return value


def check_ints(values: list[Any], what: str, maximum: int) -> None:
    """Check that each value is an integer in 0..maximum."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > maximum:
        for value in values:
            check_int(value, what, maximum)


def check_str(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise CorruptPatchError(f"{what} must be a string, got {value!r:.80}")
    return value


def check_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptPatchError(f"{what} must be a list, got {value!r:.80}")
    return value


def check_hex(value: object, what: str, digits: int = 32) -> str:
    """`value` as a string of exactly `digits` lower-case hex digits."""
    if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
        raise CorruptPatchError(f"{what} must be {digits} hex digits, got {value!r:.80}")
    return value
