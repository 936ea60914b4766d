"""Tensor names: what wrappers add to them, and how a trainer's names meet a schema's.

Nothing is ever skipped: each name either finds its tensor, or is a second name of a tied weight
whose other name does, or is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stitch.errors import SchemaMismatchError
from stitch.types import Schema, TensorSpec

WRAPPER_COMPONENTS = frozenset(
    {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Path components that torch.compile, (D)DP, FSDP and activation checkpointing insert."""

_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(sorted(WRAPPER_COMPONENTS))})\.")

_MAX_LISTED = 8
"""Names of each kind that an error message shows."""

_MAX_COMPARED = 20_000
"""Names among which a near one is looked for; comparing is slow."""


@dataclass(frozen=True, kw_only=True)
class NameMatch:
    """Which given name stands for which tensor, and which were redundant."""

    chosen: Mapping[str, str]
    """Given name -> schema name; covers the whole schema."""

    dropped: tuple[str, ...]
    """Second names of tied weights that the schema does not list."""


def canonical_name(name: str) -> str:
    """`name` without wrapper components, wherever they stand but at the end."""
    return _WRAPPERS.sub("", name)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Given name -> canonical name; SchemaMismatchError if two become one."""
    result: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name in names:
        canonical = canonical_name(name)
        other = origins.setdefault(canonical, name)
        if name in result or other != name:
            raise SchemaMismatchError(collision(other, name, canonical))
        result[name] = canonical
    return result


class NameTable:
    """Finds a schema's tensor by a trainer's name, with or without wrapper components.

    A checkpoint may itself use a component such as `module`; so a name that the schema has wins as
    it stands, and otherwise both sides are compared in canonical form.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._by_canonical: dict[str, str | None] = {}
        for name in schema.index:
            canonical = canonical_name(name)
            taken = canonical in self._by_canonical
            self._by_canonical[canonical] = None if taken else name

    def find(self, name: str) -> str | None:
        """The schema's name of the tensor that `name` stands for, or None."""
        if name in self._schema:
            return name
        return self._by_canonical.get(canonical_name(name))


def match_names(
    schema: Schema, names: Iterable[str], *, aliases: Iterable[Collection[str]] = ()
) -> NameMatch:
    """Give every tensor of the schema its one name among `names`.

    `aliases` are groups of given names that stand for the same memory. A name outside the schema is
    dropped if another of its group is inside. Raises SchemaMismatchError that lists all unknown and
    missing names, with near ones.
    """
    table = NameTable(schema)
    chosen: dict[str, str] = {}
    origins: dict[str, str] = {}
    strays: list[str] = []
    for name in names:
        target = table.find(name)
        if target is None:
            strays.append(name)
            continue
        other = origins.setdefault(target, name)
        if name in chosen or other != name:
            raise SchemaMismatchError(collision(other, name, target))
        chosen[name] = target
    tied = {name for group in aliases if not chosen.keys().isdisjoint(group) for name in group}
    unknown = [name for name in strays if name not in tied]
    missing = [name for name in schema.index if name not in origins]
    if unknown or missing:
        raise SchemaMismatchError(describe_mismatch(schema, unknown=unknown, missing=missing))
    return NameMatch(chosen=chosen, dropped=tuple(name for name in strays if name in tied))


def describe_mismatch(
    schema: Schema,
    *,
    unknown: Sequence[str] = (),
    missing: Sequence[str] = (),
    reshaped: Sequence[tuple[TensorSpec, TensorSpec]] = (),
) -> str:
    """A message that lists every problem. `reshaped` holds pairs (got, wanted)."""
    parts = []
    if unknown:
        # A typo leaves its tensor missing, so that is where the near names are.
        pool = missing or tuple(schema.index)
        hinted = [_with_hint(name, pool) for name in unknown[:_MAX_LISTED]]
        parts.append(_listed("unknown", len(unknown), hinted))
    if missing:
        parts.append(_listed("missing", len(missing), missing[:_MAX_LISTED]))
    if reshaped:
        rows = [describe_change(got, wanted) for got, wanted in reshaped[:_MAX_LISTED]]
        parts.append(_listed("of another dtype or shape", len(reshaped), rows))
    return f"the tensors do not match the {len(schema)} of the schema: " + "; ".join(parts)


def describe_change(got: TensorSpec, wanted: TensorSpec) -> str:
    """One tensor whose dtype or shape is not the schema's."""
    note = ""
    if got.shape != wanted.shape and got.num_words == wanted.num_words:
        note = " (as many elements, another shape)"
    return (
        f"{wanted.name}: got {got.dtype}{list(got.shape)}, "
        f"wanted {wanted.dtype}{list(wanted.shape)}{note}"
    )


def collision(first: str, second: str, target: str) -> str:
    """The message for two given names that stand for one tensor."""
    if first == second:
        return f"the tensor {first!r} was given twice"
    return f"{first!r} and {second!r} both stand for the tensor {target!r}"


def _with_hint(name: str, pool: Sequence[str]) -> str:
    near = difflib.get_close_matches(canonical_name(name), pool[:_MAX_COMPARED], n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _listed(kind: str, count: int, rows: Sequence[str]) -> str:
    more = f" and {count - len(rows)} more" if count > len(rows) else ""
    return f"{count} {kind}: {', '.join(rows)}{more}"
