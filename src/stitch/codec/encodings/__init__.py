"""Encodings of one bucket's changes, one module each.

To add one: a class that is an :class:`~stitch.codec.encodings.port.Encoding`, an entry in
ENCODINGS, a section in docs/format.md, a numpy reference and golden files.
"""

from __future__ import annotations

from collections.abc import Mapping

from stitch.codec.encodings.dense import Dense
from stitch.codec.encodings.gaps import Gaps
from stitch.codec.encodings.port import DecodedChanges, Encoding, Joining, OldWords, Payload
from stitch.codec.encodings.ranks import Ranks
from stitch.errors import UnsupportedFormatError

__all__ = [
    "ENCODINGS",
    "JOINING",
    "DecodedChanges",
    "Encoding",
    "Joining",
    "OldWords",
    "Payload",
    "encoding_named",
]

ENCODINGS: Mapping[str, Encoding] = {"gaps": Gaps(), "ranks": Ranks(), "dense": Dense()}
"""Name in the table -> encoding. A bucket without changes is absent from the table."""
JOINING: Mapping[str, Joining] = {
    name: encoding for name, encoding in ENCODINGS.items() if isinstance(encoding, Joining)
}
"""Those that can decode several buckets together."""


def encoding_named(name: str, what: str) -> Encoding:
    """The encoding, or UnsupportedFormatError."""
    if name not in ENCODINGS:
        raise UnsupportedFormatError(
            f"{what}: encoding {name!r:.60} is not one of {', '.join(ENCODINGS)}"
        )
    return ENCODINGS[name]
