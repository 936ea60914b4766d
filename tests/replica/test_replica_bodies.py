"""Constraints and salts in request bodies, by bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import ConstraintError
from stitch.replica.body import RequestBody, merge_constraints, read_body, splice_members
from stitch.replica.salt import MAX_SALT_CHARS, salted, version_salt
from stitch.types import VersionConstraint, VersionRef

REF = VersionRef("math", 7)
AT_LEAST_7 = VersionConstraint(min_version=7)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"weight_version":{"min_version":7}}', b"{}"),
        (b'{"a":1,"weight_version":{"min_version":7}}', b'{"a":1}'),
        (b'{"weight_version":{"min_version":7},"a":1.50}', b'{"a":1.50}'),
        (b'{"a":1 ,\n "weight_version" : { "min_version" : 7 } , "b":2}', b'{"a":1 , "b":2}'),
        (b'\xef\xbb\xbf{"weight_version":{"min_version":7}}', b"\xef\xbb\xbf{}"),
    ],
)
def test_the_constraint_is_cut_out_and_the_rest_stays_as_it_was(body: bytes, left: bytes) -> None:
    got = read_body(body, None)
    assert got.constraint == AT_LEAST_7
    assert got.data == left


def test_an_exact_constraint_is_read_too() -> None:
    got = read_body(b'{"weight_version":{"exact_version":3}}', None)
    assert got.constraint == VersionConstraint(exact_version=3)


def test_a_key_spelled_with_escapes_counts_and_is_removed() -> None:
    got = read_body(b'{"weight\\u005fversion":{"min_version":7},"prompt":"x"}', None)
    assert got.constraint == AT_LEAST_7
    assert json.loads(got.data) == {"prompt": "x"}


def test_the_last_of_repeated_keys_counts_and_all_are_removed() -> None:
    got = read_body(
        b'{"weight_version":{"min_version":1},"weight_version":{"min_version":7}}', None
    )
    assert got.constraint == AT_LEAST_7
    assert got.data == b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"say \\"weight_version\\": {\\"min_version\\": 7}"}',
        b'{"metadata":{"weight_version":{"min_version":7}}}',
        b'{"prompt":"weight_version"}',
        b'["weight_version"]',
        b"not json at all, weight_version",
        b"",
    ],
)
def test_the_words_elsewhere_are_not_a_constraint(body: bytes) -> None:
    assert read_body(body, None) == RequestBody(body, is_object=body.startswith(b"{"))


@pytest.mark.parametrize(
    "value",
    [
        "7", '"7"', "null", "{}", '{"min_version":"7"}', '{"min_version":-1}',
        '{"min_version":7.0}',
        '{"min_version":1,"exact_version":1}', '{"max_version":1}', '{"min_version":100000000}',
        '{"min_version":true}', "[7]",
    ],
)  # fmt: skip
def test_a_malformed_constraint_is_refused(value: str) -> None:
    with pytest.raises(ConstraintError):
        read_body(f'{{"weight_version":{value}}}'.encode(), None)


def test_a_broken_body_that_mentions_the_key_is_refused_and_others_are_the_engines_matter() -> None:
    with pytest.raises(ConstraintError, match="not valid JSON"):
        read_body(b'{"weight_version":{"min_version":7}', None)
    assert read_body(b'{"prompt":', "cache_salt").data == b'{"prompt":'
    deep = b'{"a":' + b"[" * 100_000 + b'"cache_salt"'
    assert read_body(deep, "cache_salt").data == deep


def test_body_and_headers_must_agree() -> None:
    none = VersionConstraint()
    assert merge_constraints(none, AT_LEAST_7) == AT_LEAST_7
    assert merge_constraints(AT_LEAST_7, none) == AT_LEAST_7
    assert merge_constraints(AT_LEAST_7, AT_LEAST_7) == AT_LEAST_7
    with pytest.raises(ConstraintError, match="disagree"):
        merge_constraints(AT_LEAST_7, VersionConstraint(exact_version=7))


def salt_of(body: bytes, field: str = "cache_salt", ref: VersionRef = REF) -> Any:
    return json.loads(salted(read_body(body, field), field, ref)).get(field)


def test_the_salt_names_run_and_version() -> None:
    assert salt_of(b'{"prompt":"x"}') == version_salt(REF) == "stitch.math.7"
    assert salt_of(b"{ }") == "stitch.math.7"
    assert salt_of(b'{"prompt":"x","cache_salt":null}') == "stitch.math.7"


def test_salts_differ_between_versions_and_runs_and_fit_any_run_name() -> None:
    refs = [VersionRef(run, v) for run in ("a" * 128, "a" * 127, "math") for v in (1, 11)]
    salts = {version_salt(ref) for ref in refs}
    assert len(salts) == len(refs)
    assert all(len(salt) <= 60 for salt in salts)


def test_a_users_salt_keeps_its_effect_and_versions_are_still_apart() -> None:
    mine = b'{"cache_salt":"tenant-1","prompt":"x"}'
    assert salt_of(mine).startswith("tenant-1.")
    assert salt_of(mine) != salt_of(mine.replace(b"1", b"2"))
    assert salt_of(mine) != salt_of(mine, ref=VersionRef("math", 8))


def test_a_long_users_salt_is_folded_into_the_allowed_length() -> None:
    one, other = ("a" * 127 + end for end in "bc")
    got = [salt_of(json.dumps({"cache_salt": salt}).encode()) for salt in (one, other)]
    assert got[0] != got[1]
    assert max(map(len, got)) <= MAX_SALT_CHARS


def test_a_batch_of_salts_is_extended_one_by_one_and_a_wrong_type_is_left_to_the_engine() -> None:
    assert salt_of(b'{"extra_key":["a",null]}', "extra_key") == [
        "a.stitch.math.7",
        "stitch.math.7",
    ]
    assert salt_of(b'{"cache_salt":5}') == 5


def test_a_salt_whose_key_is_spelled_with_escapes_is_found() -> None:
    assert salt_of(b'{"cache\\u005fsalt":"mine"}') == "mine.stitch.math.7"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(["weight_version", "cache_salt", "prompt", "a"]) | st.text()


@given(
    value=st.dictionaries(KEYS.filter(lambda k: k != "weight_version"), json_values, max_size=5),
    constrained=st.booleans(),
    at=st.integers(0, 5),
    compact=st.booleans(),
    ascii_only=st.booleans(),
)
def test_any_object_survives_the_cut_and_the_salt(
    value: dict[str, Any], constrained: bool, at: int, compact: bool, ascii_only: bool
) -> None:
    items = list(value.items())
    if constrained:
        items.insert(at, ("weight_version", {"min_version": 7}))
    separators = (",", ":") if compact else None
    text = json.dumps(dict(items), separators=separators, ensure_ascii=ascii_only)
    body = text.encode("utf-8", "surrogatepass")
    try:
        body.decode()
    except UnicodeDecodeError:
        return  # lone surrogates are not JSON in UTF-8
    got = read_body(body, "cache_salt")
    assert got.constraint == (AT_LEAST_7 if constrained else VersionConstraint())
    forwarded = json.loads(salted(got, "cache_salt", REF))
    kept = forwarded.pop("cache_salt")
    user = value.get("cache_salt")
    assert forwarded == {k: v for k, v in value.items() if k != "cache_salt"}
    if user is None:
        assert kept == "stitch.math.7"


def test_members_go_to_the_end_of_an_object_and_nowhere_else() -> None:
    assert splice_members(b'{"a":1}\n', b'"b":2') == b'{"a":1,"b":2}\n'
    assert splice_members(b"{ \n}", b'"b":2') == b'{"b":2}'
    assert splice_members(b"[1]", b'"b":2') is None
    assert splice_members(b"", b'"b":2') is None


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        (b'{"a":[1,{"weight_version":{"min_version":7}}]}', None),
        (b'{"a":{"weight_version":{"min_version":7}}}', None),
        (b'{"a":{"b":1,"weight_version":{"min_version":7}} }', None),
        (b'{"x\\"weight_version":{"min_version":7}}', None),
        (b'{"x,\\"weight_version":{"min_version":7}}', None),
        (b'{"a":"{","weight_version":{"min_version":7}}', AT_LEAST_7),
        (b'{"a":"}}","weight_version":{"min_version":7} }\n', AT_LEAST_7),
        (b' { "weight_version":{"min_version":7},"a":{"b":1}}', AT_LEAST_7),
        (b'{"a":1,"weight_version":{"min_version":7},"b":"}"}', AT_LEAST_7),
    ],
)
def test_where_the_key_stands_decides_with_and_without_parsing(
    body: bytes, constraint: VersionConstraint | None
) -> None:
    got = read_body(body, None)
    assert got.constraint == (constraint or VersionConstraint())
    expected = json.loads(body)
    if constraint:
        del expected["weight_version"]
    assert json.loads(got.data) == expected


def test_a_long_prompt_is_not_parsed_for_a_constraint_at_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stitch.replica.body._DECODER", None)
    constraint = b'"weight_version":{"min_version":7}'
    rest = b'"prompt":[' + b"1," * 1000 + b"1]"
    for body in (b"{" + rest + b"," + constraint + b"}", b"{" + constraint + b"," + rest + b"}"):
        got = read_body(body, "cache_salt")
        assert (got.constraint, got.data) == (AT_LEAST_7, b"{" + rest + b"}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_json_in_another_encoding_is_refused_since_its_demands_would_not_be_seen(
    encoding: str,
) -> None:
    with pytest.raises(ConstraintError, match="UTF-8"):
        read_body(' {"weight_version":{"min_version":7}}'.encode(encoding), "cache_salt")
    other = "no object".encode(encoding)
    assert read_body(other, "cache_salt").data == other


def test_a_body_too_deep_to_be_read_is_refused_if_escapes_may_spell_the_key() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(ConstraintError, match="can be read here"):
        read_body(b'{"weight\\u005fversion":{"min_version":7},"a":%b}' % deep, None)
