"""What a request's body says to Stitch: the version constraint and the cache salt.

Bodies are bytes and stay bytes. JSON is parsed only when a cheap substring test says that one of
our keys may be in it; the constraint is then cut out in place, so that the engine sees what the
client wrote (number formats, key order and all). Only odd bodies (repeated keys, keys spelled
with escapes) are written anew from the parsed value.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace

from stitch.errors import ConstraintError
from stitch.types import VersionConstraint

CONSTRAINT_KEY = "weight_version"
NO_CONSTRAINT = VersionConstraint()

_QUOTED_CONSTRAINT = b'"weight_version"'
_JSON_OBJECT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")
_WIDE_OBJECT = re.compile(rb"(?:\xff\xfe|\xfe\xff)?[\x00 \t\r\n]*(?:\xfe\xff)?[\x00 \t\r\n]*\{")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MEMBER = re.compile(
    rb'"weight_version"[ \t\r\n]*:[ \t\r\n]*'
    rb'\{[ \t\r\n]*"(?:min|exact)_version"[ \t\r\n]*:[ \t\r\n]*[0-9]+[ \t\r\n]*\}'
)
_PLAIN = re.compile(
    rb'"weight_version"[ \t\r\n]*:[ \t\r\n]*'
    rb'\{[ \t\r\n]*"(min|exact)_version"[ \t\r\n]*:[ \t\r\n]*(0|[1-9][0-9]{0,7})[ \t\r\n]*\}'
)
_SPACE = b" \t\r\n"
_DECODER = json.JSONDecoder()


@dataclass(slots=True)  # made per request: frozen would cost more to build
class RequestBody:
    """A body ready to be forwarded.

    `data`: without the constraint. `is_object`: whether a JSON object starts here, into which a
    salt can be spliced. `salts`: the user's own value of the salt field, if there was one (then
    `parsed` holds the whole object).
    """

    data: bytes
    constraint: VersionConstraint = NO_CONSTRAINT
    is_object: bool = False
    user_salt: object = None
    parsed: dict[str, object] | None = None


def read_body(data: bytes, salt_field: str | None) -> RequestBody:
    """Inspect a request body; raises ConstraintError when it carries a malformed constraint.

    `salt_field`: the engine's cache-salt key on routes that take one, else None.
    """
    if data[:1] != b"{" or b"\x00" in data[1:4]:  # not plainly an object in UTF-8
        if b"\x00" in data[:4] or data[:2] in _UTF16_MARKS:
            _refuse_wide_object(data)
        if not _JSON_OBJECT.match(data):
            return RequestBody(data)
    has_escapes = b"\\u" in data
    num_quoted = data.count(_QUOTED_CONSTRAINT)
    may_have_salt = salt_field is not None and _quoted(salt_field) in data
    if not (num_quoted or may_have_salt or has_escapes):
        return RequestBody(data, is_object=True)
    if num_quoted == 1 and not (may_have_salt or has_escapes):
        found = _outermost_constraint(data)
        if found is not None:
            rest, constraint = found
            return RequestBody(rest, constraint, is_object=True)
    value = _parse(data, strict=num_quoted > 0)
    if not isinstance(value, dict):
        return RequestBody(data, is_object=True)
    constraint = NO_CONSTRAINT
    if CONSTRAINT_KEY in value:
        constraint = VersionConstraint.parse(value.pop(CONSTRAINT_KEY))
        cut = cut_constraint(data) if num_quoted == 1 and not has_escapes else None
        data = dump_json(value) if cut is None else cut
    if salt_field is not None and value.get(salt_field) is not None:
        return RequestBody(data, constraint, True, value[salt_field], value)
    if salt_field is not None and salt_field in value:  # null: as good as absent
        del value[salt_field]
        data = dump_json(value)
    return RequestBody(data, constraint, is_object=True)


def _refuse_wide_object(data: bytes) -> None:
    """Raise ConstraintError for a JSON object in UTF-16 or UTF-32.

    Some parsers, Python's among them, take those; what they demand would not be seen here.
    """
    if _WIDE_OBJECT.match(data):
        raise ConstraintError("JSON bodies must be in UTF-8 (RFC 8259, section 8.1)")


def _outermost_constraint(data: bytes) -> tuple[bytes, VersionConstraint] | None:
    """Body without constraint, and constraint, if it is plainly the first or the last member.

    Then it need not be parsed to know that it is at the top level: what the first brace opens and
    the last one closes is the whole, and no text can hold unescaped quotes. That matters for long
    prompts. None means: parse it.
    """
    at = data.find(_QUOTED_CONSTRAINT)
    match = _PLAIN.match(data, at)
    if match is None:
        return None
    before, after = data[:at].rstrip(_SPACE), data[match.end() :].strip(_SPACE)
    is_first = before.lstrip(_SPACE) == b"{"
    if is_first and after[:1] == b",":
        rest = before + after[1:]
    elif after == b"}" and (is_first or before[-1:] == b","):
        rest = (before if is_first else before[:-1]) + after
    else:
        return None
    return rest, _constraint(match[1], match[2])


@functools.lru_cache(maxsize=64)
def _constraint(kind: bytes, number: bytes) -> VersionConstraint:
    if kind == b"min":
        return VersionConstraint(min_version=int(number))
    return VersionConstraint(exact_version=int(number))


def cut_constraint(data: bytes) -> bytes | None:
    """`data` without its one `weight_version` member and one comma, or None if it is not plain.

    The caller has made sure that the object has exactly this one such key, at its top level.
    """
    match = _MEMBER.match(data, data.find(_QUOTED_CONSTRAINT))
    if match is None:
        return None
    before, after = data[: match.start()].rstrip(), data[match.end() :].lstrip()
    if before.endswith(b","):
        return before[:-1] + after
    if after.startswith(b","):
        return before + after[1:]
    return before + after


@functools.cache
def _quoted(key: str) -> bytes:
    return f'"{key}"'.encode()


def dump_json(value: object) -> bytes:
    """Compact JSON of a parsed body."""
    return json.dumps(value, separators=(",", ":")).encode()


def splice_members(data: bytes, members: bytes) -> bytes | None:
    """Put `members` (`"key":value,...`) at the end of the JSON object in `data`.

    At the end, since parsers let the last of repeated keys win. None if `data` does not end in
    an object.
    """
    end = len(data)
    while end and data[end - 1] in _SPACE:
        end -= 1
    if not end or data[end - 1] != 0x7D:  # "}"
        return None
    start = end - 1
    while start and data[start - 1] in _SPACE:
        start -= 1
    comma = b"" if not start or data[start - 1] == 0x7B else b","  # "{": an empty object
    return b"".join((data[:start], comma, members, data[end - 1 :]))


def merge_constraints(body: VersionConstraint, headers: VersionConstraint) -> VersionConstraint:
    """The request's one constraint; raises ConstraintError when body and headers disagree."""
    if headers is NO_CONSTRAINT or headers == body:
        return body
    run, other = body.run or headers.run, headers.run or body.run
    lacks = body if body.target is None else headers
    given = headers if body.target is None else body
    if run == other and (lacks.target is None or replace(headers, run=body.run) == body):
        return replace(given, run=run)
    raise ConstraintError(
        f"the body's weight_version ({_show(body)}) and the X-Stitch headers "
        f"({_show(headers)}) disagree; send one of them"
    )


def _show(constraint: VersionConstraint) -> str:
    of_run = "" if constraint.run is None else f" of run {constraint.run!r}"
    if constraint.exact_version is not None:
        return f"exact_version {constraint.exact_version}{of_run}"
    if constraint.min_version is not None:
        return f"min_version {constraint.min_version}{of_run}"
    return of_run.strip()


def _parse(data: bytes, *, strict: bool) -> object:
    """Parsed JSON; for a body that does not parse: ConstraintError if `strict`, else None.

    A broken body without our key is the engine's to reject, in its own words. One that is only
    beyond this parser's limits may be whole to the engine's: with escapes in it, which may spell
    our key, it is refused too.
    """
    try:
        return _DECODER.decode(data.decode("utf-8-sig" if data[:1] == b"\xef" else "utf-8"))
    except (ValueError, RecursionError) as error:
        beyond_limits = not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        if strict or (beyond_limits and b"\\u" in data):
            raise ConstraintError(
                "the body may demand a weight_version and is not valid JSON that can be read here: "
                f"{error}"
            ) from None
        return None
