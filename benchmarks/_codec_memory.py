"""Peak memory of encode and apply beyond inputs and outputs, in sizes of a bucket.

The kernel's high-water mark of resident memory, so that what the compressors take counts, too. A
process of its own holds old and new weights; each measurement runs in a fork of it, so that no
memory that an earlier one freed is used again unseen. Outputs are the patch files, and for apply
the update set, whose words and positions are written into the weights.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks._memory import peak_bytes, start_watching

DENSITY = 0.005


def measure_memory(
    num_elements: int, encodings: Sequence[str], threads: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows with `codec`, `cores`, `encode_buckets` and `apply_buckets`."""
    command = [sys.executable, "-m", "benchmarks._codec_memory"]
    command += ["--elements", str(num_elements), "--encodings", ",".join(encodings)]
    command += ["--threads", ",".join(map(str, threads))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--encodings", required=True)
    parser.add_argument("--threads", required=True)
    args = parser.parse_args()
    encodings = args.encodings.split(",")
    step = _prepare(args.elements, encodings)
    rows = [
        _in_fork(partial(_measure, step, name, count))
        for name in encodings
        for count in map(int, args.threads.split(","))
    ]
    print(json.dumps(rows))


def _prepare(num_elements: int, encodings: Sequence[str]) -> Any:
    """The step to measure on; everything that is loaded or compiled once is by now."""
    from benchmarks._codec_data import Synthetic
    from benchmarks._codec_wires import Stitch
    from stitch.codec import DigestState, warm

    warm()
    small = Synthetic(1 << 16).step(DENSITY)
    for name in encodings:
        wire = Stitch(name, DigestState.of(small.old), 1)
        wire.apply(wire.encode(small.old, small.new), small.old)
    return Synthetic(num_elements).step(DENSITY)


def _in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(writing, json.dumps(function()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("measuring memory failed")
    result: dict[str, Any] = json.loads(text)
    return result


def _measure(step: Any, encoding: str, threads: int) -> dict[str, Any]:
    from stitch.codec import DigestState, PatchEncoder, decode_parts
    from stitch.codec.buckets import DEFAULT_BUCKET_ELEMENTS

    before = DigestState.of(step.old)
    start = _start()
    encoder = PatchEncoder(step.old, step.new, before=before, encoding=encoding, threads=threads)
    files = list(encoder.parts())
    encode_bytes = peak_bytes() - start - sum(map(len, files))
    del encoder
    start = _start()
    update, _ = decode_parts(files, step.old, before, threads=threads)
    update.apply(step.old)
    apply_bytes = peak_bytes() - start - update.num_bytes
    bucket_bytes = 2 * DEFAULT_BUCKET_ELEMENTS
    return {
        "codec": encoding,
        "cores": threads,
        "encode_buckets": round(max(0, encode_bytes) / bucket_bytes, 2),
        "apply_buckets": round(max(0, apply_bytes) / bucket_bytes, 2),
    }


def _start() -> int:
    """Resident bytes once all free memory is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return start_watching()


if __name__ == "__main__":
    main()
