"""The figures that the codec is held to, each a ratio within one run, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

XOR = "xor+zstd1+xxh3"
REAL = "real"
_ENCODED = ("synthetic 0.2%", "synthetic 0.5%", REAL)

Row = Mapping[str, Any]


class Figures:
    """Computes what the rows of one run allow; what they lack is left out."""

    def __init__(
        self, rows: Sequence[Row], memory: Sequence[Row], growth: Mapping[str, float]
    ) -> None:
        self._rows = {(row["data"], row["codec"], row["cores"]): row for row in rows}
        self._memory, self._growth = memory, growth

    def all(self) -> tuple[dict[str, float], dict[str, str]]:
        """(figure by name, what is wanted by name, as ">= 2.5")."""
        ratios: dict[str, float] = {}
        wanted: dict[str, str] = {}
        for name, want, compute in self._named():
            try:
                ratios[name] = round(compute(), 4)
            except (KeyError, ValueError):
                continue
            wanted[name] = want
        return ratios, wanted

    def _named(self) -> Iterator[tuple[str, str, Callable[[], float]]]:
        yield "gaps_bytes_real_mean", "<= 1.85", lambda: self._bytes("gaps")
        yield "ranks_bytes_real_mean", "<= 1.05", lambda: self._bytes("ranks")
        yield (
            "ranks_over_xor_bytes_real_mean",
            "<= 0.34",
            lambda: self._bytes("ranks") / self._bytes(XOR),
        )
        for codec, want in (("gaps", ">= 2.5"), ("ranks", ">= 0.8")):
            for data in _ENCODED:
                yield self._over_xor(codec, "encode", data, want)
        for data, want in (("synthetic 0.05%", ">= 15"), ("synthetic 0.5%", ">= 4")):
            yield self._over_xor("gaps", "apply", data, want)
        for data in ("synthetic 0.05%", *_ENCODED):
            yield self._over_xor("ranks", "apply", data, ">= 0.5")
        growth = self._growth
        yield (
            "gaps_apply_time_4n_over_n",
            "well below 4",
            lambda: growth["apply_4n_k_us"] / growth["apply_n_k_us"],
        )
        yield (
            "gaps_apply_time_4k_over_k",
            "at most about 4",
            lambda: growth["apply_4n_4k_us"] / growth["apply_4n_k_us"],
        )
        yield "digest_over_copy", ">= 0.6", self._digest_over_copy
        for verb in ("encode", "apply"):
            for codec in ("gaps", "ranks", "auto"):
                name = f"two_cores_over_one_{verb}_{codec}"
                yield name, ">= 1.5", self._two_cores(codec, verb)
        for verb in ("encode", "apply"):
            yield f"peak_{verb}_buckets", "<= 4", self._peak(verb)

    def _bytes(self, codec: str) -> float:
        value: float = self._rows[REAL, codec, 1]["bytes_per_changed_element"]
        return value

    def _speed(self, data: str, codec: str, verb: str, cores: int = 1) -> float:
        value: float = self._rows[data, codec, cores][f"{verb}_gb_s"]
        return value

    def _over_xor(
        self, codec: str, verb: str, data: str, want: str
    ) -> tuple[str, str, Callable[[], float]]:
        name = f"{codec}_{verb}_over_xor_{data.removeprefix('synthetic ')}"
        return name, want, lambda: self._speed(data, codec, verb) / self._speed(data, XOR, verb)

    def _digest_over_copy(self) -> float:
        """The best of each over all synthetic data, on one core."""

        def best(name: str) -> float:
            keys = (key for key in self._rows if key[0] != REAL and key[1:] == (name, 1))
            return max(self._speed(data, name, "encode") for data, _, _ in keys)

        return best("digest") / best("copy")

    def _two_cores(self, codec: str, verb: str) -> Callable[[], float]:
        data = "synthetic 0.5%"
        name = f"{verb}_elapsed"
        return lambda: self._speed(data, codec, name, 2) / self._speed(data, codec, name)

    def _peak(self, verb: str) -> Callable[[], float]:
        return lambda: max(row[f"{verb}_buckets"] for row in self._memory)
