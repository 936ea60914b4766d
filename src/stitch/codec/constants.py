"""Numbers of the formats. See docs/format.md."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""Digest: multiplier of the word index (2^64 divided by the golden ratio, made odd)."""
MIX_1 = 0xD6E8FEB86659FD93
MIX_2 = 0xA0761D6478BD642F
MIX_3 = 0xE7037ED1A0B428DB
"""Digest: odd multipliers of the mix."""
