"""What an engine's own checksums prove: parameter by parameter, what it should hold and what not.

Three kinds of parameters. *Explained*: a recipe gave the reported checksum for weights that are
known, so it gives those of every other version before that is loaded. *Followed*: no recipe fits
(the engine hashes in a way of its own, or lays the parameter out anew), but its checkpoint tensors
are known: it must change when they do, and only then. *Dark*: nothing can be told, as with
parameters that the engine has emptied after packing copies of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from stitch.engines.reload.recipes import Guesses, Parameter, Recipe, digest_of
from stitch.tensors.reader import WeightReader

Checksums = Mapping[Parameter, str]
"""What an engine reports: hex digits, as many as it gives."""

EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """How the parameters of one engine are explained; made with `learned`."""

    recipes: Mapping[Parameter, Recipe]
    followed: Mapping[Parameter, tuple[str, ...]]
    dark: frozenset[Parameter]

    @classmethod
    def learned(cls, reported: Checksums, reader: WeightReader, guesses: Guesses) -> Knowledge:
        """From the checksums of an engine that has loaded what `reader` holds."""
        recipes: dict[Parameter, Recipe] = {}
        followed: dict[Parameter, tuple[str, ...]] = {}
        dark: set[Parameter] = set()
        for parameter, found in reported.items():
            recipe = _fitting(guesses.recipes(parameter), found, reader)
            sources = guesses.sources(parameter)
            if EMPTY.startswith(found):
                dark.add(parameter)
            elif recipe is not None:
                recipes[parameter] = recipe
            elif sources:
                followed[parameter] = sources
            else:
                dark.add(parameter)
        return cls(recipes=recipes, followed=followed, dark=frozenset(dark))

    @property
    def explains_all(self) -> bool:
        return bool(self.recipes) and not self.followed and not self.dark

    def expected(self, reader: WeightReader) -> Checksums:
        """The checksums of all explained parameters once `reader`'s weights are loaded."""
        return {parameter: digest_of(recipe, reader) for parameter, recipe in self.recipes.items()}

    def faults(
        self, found: Checksums, *, expected: Checksums, before: Checksums, changed: Set[str]
    ) -> Iterator[str]:
        """What is wrong with the checksums reported after a load; nothing if all is as it should.

        before: those reported when the engine held other weights, from which the tensors `changed`
        differ.
        """
        known = {*self.recipes, *self.followed, *self.dark}
        if found.keys() != known:
            yield f"{len(found.keys() ^ known)} parameters came or went"
            return
        for parameter, wanted in expected.items():
            if not wanted.startswith(found[parameter]):
                yield f"{_text(parameter)} has checksum {found[parameter]}, expected {wanted}"
        for parameter, sources in self.followed.items():
            moved, should = found[parameter] != before[parameter], not changed.isdisjoint(sources)
            if moved != should:
                yield f"{_text(parameter)} {'changed' if moved else 'did not change'}"


def _fitting(recipes: Iterator[Recipe], found: str, reader: WeightReader) -> Recipe | None:
    return next((recipe for recipe in recipes if digest_of(recipe, reader).startswith(found)), None)


def _text(parameter: Parameter) -> str:
    return f"parameter {parameter.name} of rank {parameter.rank}"
