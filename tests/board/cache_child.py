"""`python cache_child.py BOARD CACHE`: reads version 1's blob over a cache, to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from blake3 import blake3

from stitch.board import BlobCache, open_board

if __name__ == "__main__":
    cache = BlobCache(Path(sys.argv[2]), max_bytes=2**30)
    run = open_board(sys.argv[1], create=False, cache=cache).open_run("math")
    (ref,) = run.manifest(1).blobs
    print(blake3(run.read_blob(1, ref)).hexdigest())
