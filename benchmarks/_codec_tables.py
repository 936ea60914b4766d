"""The codec benchmark as tables in Markdown: one per quantity, codecs down, data across."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._command import table

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
        yield from table(heads, ([str(row[key]) for key in keys] for row in result["memory"]))
    yield from table(
        ["figure", "value", "wanted"],
        (
            [f"`{name}`", f"{value:.3g}", result["wanted"][name]]
            for name, value in result["ratios"].items()
        ),
    )
    yield f"Two threads get {result['second_cpu']:.2f} times as much arithmetic done as one."


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
    yield from table([title, *heads.values()], body)
