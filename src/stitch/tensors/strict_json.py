"""JSON from untrusted files: repeated keys are refused, and objects read member by member."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from stitch.errors import CorruptCheckpointError

MAX_MEMBER_CHARS = 1 << 13
"""Longest name and longest value that `members` decodes."""

MAX_METADATA_CHARS = 8 << 20
"""Longest `__metadata__` value; training tools put whole data set descriptions there."""

METADATA = "__metadata__"

_SPACE = re.compile(r"[ \t\n\r]*")


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A hook for `json.loads` that refuses repeated keys with CorruptCheckpointError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptCheckpointError(f"the JSON repeats the key {key!r:.200}")
            seen.add(key)
    return found


def members(text: str) -> Iterator[tuple[str, object]]:
    """(key, value) of the one object in `text`, decoded as they are asked for.

    So the caller can refuse the first bad value before the rest takes memory: decoded JSON is many
    times larger than its text. Numbers are natural numbers of at most 20 digits. Repeated keys at
    the top are for the caller to find. Raises CorruptCheckpointError or ValueError.
    """
    if not text.startswith("{"):
        raise CorruptCheckpointError(f"the header must start with '{{', found {text[:1]!r}")
    at = _skip_space(text, 1)
    mark = text[at : at + 1]
    if mark != "}":
        mark = ","
        at -= 1
    while mark == ",":
        key, at = _decode(text, _skip_space(text, at + 1), MAX_MEMBER_CHARS)
        at = _skip_space(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise CorruptCheckpointError(f"the header is malformed at character {at}")
        limit = MAX_METADATA_CHARS if key == METADATA else MAX_MEMBER_CHARS
        value, at = _decode(text, _skip_space(text, at + 1), limit)
        yield key, value
        at = _skip_space(text, at)
        mark = text[at : at + 1]
    if mark != "}" or _skip_space(text, at + 1) != len(text):
        raise CorruptCheckpointError(f"the header is malformed at character {at}")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches the empty string
    return match.end()


def _decode(text: str, at: int, limit: int) -> tuple[object, int]:
    """The value that starts at `at` and where it ends."""
    try:
        value, length = _DECODER.raw_decode(text[at : at + limit])
    except json.JSONDecodeError as error:
        raise CorruptCheckpointError(
            f"the header is not valid JSON, or one entry exceeds {limit} characters: {error.msg} "
            f"at character {at + error.pos}"
        ) from None
    return value, at + length


def _parse_natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 20:
        raise CorruptCheckpointError(f"the header holds {digits:.40}: not a size or an offset")
    return int(digits)


def _refuse_number(text: str) -> int:
    raise CorruptCheckpointError(f"the header holds {text:.40}: only whole numbers are allowed")


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys,
    parse_int=_parse_natural,
    parse_float=_refuse_number,
    parse_constant=_refuse_number,
)
