"""The codec benchmark as tables in Markdown: one per quantity, codecs down, data across."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines to print."""
    rows: Sequence[Row] = result["rows"]
    cores = sorted({row["cores"] for row in rows})
    yield from _pivot(rows, "bytes per changed element", "bytes_per_changed_element", cores[0])
    for verb in ("encode", "apply"):
        for count in cores:
            title = f"{verb}, GB/s of weights, {count} core{'s' * (count > 1)}"
            yield from _pivot(rows, title, f"{verb}_gb_s", count)
    if result["memory"]:
        heads = ["peak memory, buckets beyond inputs and outputs", "cores", "encode", "apply"]
        keys = ("codec", "cores", "encode_buckets", "apply_buckets")
        yield from _table(heads, ([str(row[key]) for key in keys] for row in result["memory"]))
    yield from _table(
        ["figure", "value", "wanted"],
        (
            [f"`{name}`", f"{value:.3g}", result["wanted"][name]]
            for name, value in result["ratios"].items()
        ),
    )


def _pivot(rows: Sequence[Row], title: str, key: str, cores: int) -> Iterator[str]:
    kept = [row for row in rows if row["cores"] == cores and row[key] is not None]
    heads = {
        row["data"]: f"real, {row['density']:.2%}"
        if row["data"] == "real"
        else row["data"].removeprefix("synthetic ")
        for row in kept
    }
    cells = {(row["codec"], row["data"]): f"{row[key]:.3g}" for row in kept}
    codecs = list(dict.fromkeys(row["codec"] for row in kept))
    body = ([f"`{codec}`", *(cells[codec, data] for data in heads)] for codec in codecs)
    yield from _table([title, *heads.values()], body)


def _table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *body):
        yield f"| {' | '.join(cells)} |"
    yield ""
