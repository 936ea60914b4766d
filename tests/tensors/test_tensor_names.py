"""Names: wrapper components, matching with a schema, messages that list every problem."""

from __future__ import annotations

import itertools
import re

import pytest

from stitch.errors import SchemaMismatchError
from stitch.tensors.names import (
    WRAPPER_COMPONENTS,
    canonical_name,
    canonical_names,
    describe_mismatch,
    match_names,
)
from stitch.types import Schema, TensorSpec


def schema_of(*names: str) -> Schema:
    return Schema.of(TensorSpec.of(name, "BF16", [2]) for name in names)


@pytest.mark.parametrize("wrappers", list(itertools.permutations(sorted(WRAPPER_COMPONENTS), 2)))
def test_wrapper_components_are_removed_alone_and_nested(wrappers: tuple[str, str]) -> None:
    first, second = wrappers
    for name in (
        f"{first}.model.layers.0.weight",
        f"model.{first}.layers.0.weight",
        f"model.layers.0.{first}.weight",
        f"{first}.{second}.model.layers.{second}.0.{first}.{first}.weight",
    ):
        assert canonical_name(name) == "model.layers.0.weight"


@pytest.mark.parametrize(
    "name", ["model.module_list.0.w", "my_orig_mod.w", "a.modules.w", "module", "a.module", "w"]
)
def test_only_whole_components_before_the_end_are_wrappers(name: str) -> None:
    assert canonical_name(name) == name


def test_names_that_become_one_are_an_error() -> None:
    assert canonical_names(["module.a", "b"]) == {"module.a": "a", "b": "b"}
    with pytest.raises(SchemaMismatchError, match=r"'a' and 'module\.a' both stand for"):
        canonical_names(["a", "module.a"])
    with pytest.raises(SchemaMismatchError, match="'a' was given twice"):
        canonical_names(["a", "a"])


def test_every_tensor_finds_its_one_name() -> None:
    match = match_names(schema_of("a", "b.c"), ["module.b._orig_mod.c", "a"])
    assert match.chosen == {"module.b._orig_mod.c": "b.c", "a": "a"}
    assert match.dropped == ()


def test_a_schema_that_uses_a_wrapper_word_itself_is_matched_as_it_stands_or_wrapped() -> None:
    schema = schema_of("vision.module.proj.w", "head.w")
    for prefix in ("", "module.", "_orig_mod."):
        names = [f"{prefix}vision.module.proj.w", f"{prefix}head.w"]
        assert list(match_names(schema, names).chosen.values()) == list(reversed(schema.index))


def test_a_schema_whose_names_differ_only_by_a_wrapper_word_needs_exact_names() -> None:
    schema = schema_of("a.module.w", "a.w")
    assert match_names(schema, ["a.w", "a.module.w"]).chosen.keys() == {"a.w", "a.module.w"}
    with pytest.raises(SchemaMismatchError, match="unknown"):
        match_names(schema, ["module.a.w", "module.a.module.w"])


def test_two_names_for_one_tensor_are_an_error_even_if_tied() -> None:
    with pytest.raises(SchemaMismatchError, match="both stand for the tensor 'a'"):
        match_names(schema_of("a"), ["a", "module.a"], aliases=[{"a", "module.a"}])


def test_a_second_name_of_a_tied_weight_is_dropped_whichever_the_schema_lists() -> None:
    names = ["embed.weight", "lm_head.weight"]
    for listed in names:
        match = match_names(schema_of(listed), names, aliases=[set(names)])
        assert list(match.chosen) == [listed]
        assert list(match.dropped) == [name for name in names if name != listed]
    both = match_names(schema_of(*names), names, aliases=[set(names)])
    assert list(both.chosen) == names


def test_a_tie_among_unknown_names_does_not_excuse_them() -> None:
    with pytest.raises(SchemaMismatchError, match="2 unknown: x, y"):
        match_names(schema_of("a"), ["a", "x", "y"], aliases=[{"x", "y"}])


def test_a_typo_is_reported_with_the_name_that_was_meant() -> None:
    schema = schema_of("model.layers.0.mlp.gate.weight", "model.norm.weight")
    with pytest.raises(SchemaMismatchError) as caught:
        match_names(schema, ["module.model.layers.0.mlp.gtae.weight", "model.norm.weight"])
    message = str(caught.value)
    assert "1 unknown: module.model.layers.0.mlp.gtae.weight" in message
    assert "did you mean model.layers.0.mlp.gate.weight?" in message
    assert "1 missing: model.layers.0.mlp.gate.weight" in message


def test_silently_ignored_prefixes_cannot_pass_as_a_match() -> None:
    schema = schema_of(*(f"model.layers.{i}.w" for i in range(100)), "head")
    names = [f"wrong.layers.{i}.w" for i in range(100)] + ["head"]
    with pytest.raises(SchemaMismatchError, match=r"100 unknown.*100 missing.*and 92 more"):
        match_names(schema, names)


def test_a_message_lists_all_three_kinds_of_problem() -> None:
    message = describe_mismatch(
        schema_of("a"),
        unknown=["zzz"],
        missing=["a"],
        reshaped=[(TensorSpec.of("b", "F32", [2, 3]), TensorSpec.of("b", "F32", [3, 2]))],
    )
    assert re.search(r"1 unknown: zzz; 1 missing: a; 1 of another dtype or shape: b: ", message)
    assert "got F32[2, 3], wanted F32[3, 2] (as many elements, another shape)" in message


def test_matching_a_hundred_thousand_names_is_not_quadratic() -> None:
    names = [f"model.layers.{i}.experts.w" for i in range(100_000)]
    match = match_names(schema_of(*names), (f"module.{name}" for name in names))
    assert len(match.chosen) == 100_000
