"""Fuzz the patch decoder with atheris: `make fuzz`. Arguments are libFuzzer's options.

Each input is one of: a payload for a bucket, damage to a valid patch behind right checksums, a
header text with the right checksum, or a whole file. Decoding must raise one of the named errors or
give exactly the right weights; anything else ends the run with the input that did it. The compiled
loops are not instrumented (a fuzzer cannot see into them): NUMBA_BOUNDSCHECK=1 makes them check
their indices.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "codec"))

with atheris.instrument_imports(
    include=[
        "stitch.codec.bins",
        "stitch.codec.buckets",
        "stitch.codec.compose",
        "stitch.codec.decode",
        "stitch.codec.encodings",
        "stitch.codec.header_checks",
        "stitch.codec.pairs",
        "stitch.codec.patch",
        "stitch.codec.ranks.scales",
        "stitch.codec.ranks.table",
        "stitch.codec.streams",
        "stitch.strict_json",
    ]
):
    from patch_damage import (
        check_decoding,
        check_payload,
        damaged_part,
        split,
        subject,
        text_of,
        with_text,
    )

    from stitch.codec import warm

PAYLOAD, DAMAGE, HEADER, FILE = range(4)
SUBJECT = subject()
NAMES = sorted(SUBJECT.parts)
SPLIT = {name: split(part) for name, part in SUBJECT.parts.items()}
BODIES = {name: text_of(part)[1] for name, part in SUBJECT.parts.items()}


def fuzz(data: bytes) -> None:
    """data: one byte for what it is, one for the encoding, one for the bucket, and the rest."""
    if len(data) < 3:
        return
    kind, name = data[0] % 4, NAMES[data[1] % len(NAMES)]
    rest = data[3:]
    if kind == PAYLOAD:
        entries = SPLIT[name][0].buckets
        entry = entries[data[2] % len(entries)]
        check_payload(name, rest, entry.num_changed, entry.bucket, SUBJECT)
    elif kind == DAMAGE:
        source = atheris.FuzzedDataProvider(rest)
        part = damaged_part(
            SUBJECT.parts[name], lambda n: source.ConsumeIntInRange(0, n - 1), SUBJECT.old.schema
        )
        check_decoding([part], SUBJECT)
    elif kind == HEADER:
        check_decoding([with_text(rest, BODIES[name])], SUBJECT)
    else:
        check_decoding([rest], SUBJECT)


def write_seeds(folder: Path) -> None:
    """Valid payloads, headers and files of each encoding."""
    for number, name in enumerate(NAMES):
        for at, payload in enumerate(SPLIT[name][1]):
            (folder / f"{name}-{at}").write_bytes(bytes([PAYLOAD, number, at]) + payload)
        text = json.dumps(text_of(SUBJECT.parts[name])[0], separators=(",", ":")).encode()
        (folder / f"{name}-header").write_bytes(bytes([HEADER, number, 0]) + text)
        (folder / f"{name}-file").write_bytes(bytes([FILE, number, 0]) + SUBJECT.parts[name])
        noise = bytes(byte for at in range(1, 9) for byte in bytes(range(0, 255, at)))
        (folder / f"{name}-damage").write_bytes(bytes([DAMAGE, number, 0]) + noise)


def main() -> None:
    warm()  # so that no input seems slow
    for name, part in SUBJECT.parts.items():
        assert check_decoding([part], SUBJECT) is None, name
    with tempfile.TemporaryDirectory() as place:
        seeds = Path(place)
        write_seeds(seeds)
        options = ["-max_len=8192", "-timeout=20", "-rss_limit_mb=4096", *sys.argv[1:]]
        atheris.Setup([sys.argv[0], *options, place], fuzz)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
