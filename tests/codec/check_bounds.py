"""Round trips and damaged payloads with compiled loops that check every index.

Run it with NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own: `python check_bounds.py COUNT
[SEED]`. Where a loop reads or writes outside an array it ends with IndexError; otherwise it prints
how many payloads it tried.
"""

from __future__ import annotations

import random
import sys

import numba
import numpy as np
import test_codec_pairs as paired
import test_codec_ranks_hostile as forged_ranks
from patch_damage import (
    check_decoding,
    check_payload,
    damaged_part,
    damaged_payload,
    split,
    subject,
)

from stitch.codec import gap_loops


def main(count: int, seed: int) -> None:
    assert numba.config.BOUNDSCHECK == 1
    _check_that_loops_check()
    whole = subject(every_width=False)
    for parts in [*whole.several.values(), *([part] for part in whole.parts.values())]:
        assert check_decoding(parts, whole) is None
    forged_ranks.test_states_and_bits_of_every_length("BF16")
    forged_ranks.test_each_field_of_the_table_at_each_extreme_before_any_states("BF16")
    choose = random.Random(seed).randrange
    paired.check_altered_bodies(choose, count)
    for number in range(count):
        encoding = list(whole.parts)[number % len(whole.parts)]
        header, payloads = split(whole.parts[encoding])
        at = choose(len(payloads))
        entry = header.buckets[at]
        payload = damaged_payload(payloads[at], choose, payloads[choose(len(payloads))])
        check_payload(encoding, payload, entry.num_changed, entry.bucket, whole)
        part = damaged_part(whole.parts[encoding], choose, whole.old.schema)
        check_decoding([part], whole)
    print(f"{count} payloads")


def _check_that_loops_check() -> None:
    try:
        gap_loops.to_gaps()(np.arange(2), -1, np.empty(1, np.uint32))
    except IndexError:
        return
    raise AssertionError("these loops check nothing")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
