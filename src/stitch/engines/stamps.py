"""Version stamps on answers: which output tokens came from which version.

Every engine of ours writes them the same way (docs/protocol.md): `weight_version_start` and
`weight_version_end` on the answer, `weight_versions` on each choice, and, in a stream, one event
that carries all of it before `[DONE]`. They are null before the engine was bound to a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stitch.types import VersionSpan

START_HEADER = "X-Stitch-Version-Start"
END_HEADER = "X-Stitch-Version-End"
STREAM_OBJECT = "stitch.versions"


def spans_of(versions: Iterable[int | None]) -> list[VersionSpan]:
    """Runs of equal versions, one item per output token; unlabelled tokens have no span."""
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if version is None:
            continue
        last = spans[-1] if spans else None
        if last is not None and last.version == version and last.end == at:
            spans[-1] = VersionSpan(version, last.start, at + 1)
        else:
            spans.append(VersionSpan(version, at, at + 1))
    return spans


def spans_json(versions: Iterable[int | None]) -> list[dict[str, int]]:
    return [span.to_json() for span in spans_of(versions)]


def bounds_of(choices: Sequence[Sequence[int | None]]) -> tuple[int | None, int | None]:
    """First and last version of an answer: lowest first token, highest last token of its choices.

    None when any of these tokens was unlabelled, or when no token came out.
    """
    firsts = [versions[0] for versions in choices if versions]
    lasts = [versions[-1] for versions in choices if versions]
    starts = [version for version in firsts if version is not None]
    ends = [version for version in lasts if version is not None]
    return (
        min(starts) if starts and len(starts) == len(firsts) else None,
        max(ends) if ends and len(ends) == len(lasts) else None,
    )


def stamp_json(choices: Sequence[Sequence[int | None]]) -> dict[str, int | None]:
    """The two fields for the top level of an answer."""
    start, end = bounds_of(choices)
    return {"weight_version_start": start, "weight_version_end": end}


def stream_event(choices: Sequence[Sequence[int | None]]) -> dict[str, object]:
    """The event that a stream carries before `[DONE]`; `weight_versions` has one list a choice."""
    return {
        "object": STREAM_OBJECT,
        "choices": [],
        **stamp_json(choices),
        "weight_versions": [spans_json(versions) for versions in choices],
    }


def headers(choices: Sequence[Sequence[int | None]]) -> dict[str, str]:
    """The headers of a whole answer; empty while versions are unknown."""
    start, end = bounds_of(choices)
    known = {START_HEADER: start, END_HEADER: end}
    return {name: str(value) for name, value in known.items() if value is not None}
