"""Counters, gauges and histograms in the Prometheus text format (version 0.0.4).

Source: https://prometheus.io/docs/instrumenting/exposition_formats/. Written out rather than
imported: a dozen series need no client library. All live on one event loop.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[str, ...]


def escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{n}="{escape(v)}"' for n, v in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


class Counter:
    """A number that only grows, per combination of label values."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name, self.help, self.labels = name, help, tuple(labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1.0, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def value(self, *labels: str) -> float:
        return self._values.get(labels, 0.0)

    def samples(self) -> Iterator[str]:
        for values, number in sorted(self._values.items()):
            yield f"{self.name}{_labels(self.labels, values)} {number:.17g}"


class Gauge:
    """A number read when it is asked for; None leaves the series out."""

    kind = "gauge"

    def __init__(self, name: str, help: str, read: Callable[[], float | None]) -> None:
        self.name, self.help, self._read = name, help, read

    def samples(self) -> Iterator[str]:
        number = self._read()
        if number is not None:
            yield f"{self.name} {number:.17g}"


class StateGauge:
    """1 for the label value that holds now and 0 for the others."""

    kind = "gauge"

    def __init__(
        self, name: str, help: str, label: str, choices: Iterable[str], read: Callable[[], str]
    ) -> None:
        self.name, self.help, self._label = name, help, label
        self._choices, self._read = tuple(choices), read

    def samples(self) -> Iterator[str]:
        now = self._read()
        for choice in self._choices:
            yield f"{self.name}{_labels((self._label,), (choice,))} {int(choice == now)}"


class Histogram:
    """A distribution over fixed upper bounds."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        self.name, self.help, self._bounds = name, help, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{self.name}_bucket{{le="{le}"}} {total}'
        yield f"{self.name}_sum {self._sum:.17g}"
        yield f"{self.name}_count {total}"


Metric = Counter | Gauge | StateGauge | Histogram


class Registry:
    """The metrics of a process, in the order they were made."""

    def __init__(self) -> None:
        self._metrics: list[Metric] = []

    def add(self, *metrics: Metric) -> None:
        self._metrics.extend(metrics)

    def text(self) -> str:
        lines: list[str] = []
        for metric in self._metrics:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines.extend(metric.samples())
        return "\n".join(lines) + "\n"
