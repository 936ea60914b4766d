"""The trainer's side of the link benchmark, told over its pipes what to publish.

    python -m benchmarks._link_publisher BOARD BASE ELEMENTS [DATA]

Writes version 0 to the file BASE and starts a run from it. `{"what": "patch"}` publishes a version,
`{"what": "checkpoint"}` saves the newest version to the disk and stores it whole on the board. The
answer says when that was begun, how long it took here, and what it weighs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._link_steps import versions
from stitch.board import open_board
from stitch.publish import Publisher
from stitch.tensors import write_checkpoint, write_safetensors


def main() -> None:
    where, base, num_elements = sys.argv[1:4]
    name, steps = versions(Path(sys.argv[4]) if sys.argv[4:] else None, int(num_elements))
    newest = next(steps)
    write_safetensors(Path(base), newest)
    board = open_board(where)
    with Publisher.start(board, "r", base, view="checkpoint", anchor_every=None) as publisher:
        say(data=name)
        for line in sys.stdin:
            if json.loads(line)["what"] == "patch":
                newest = next(steps)
                began_s = time.time()
                version = publisher.publish(newest).wait().version
                num_bytes = publisher.run.manifest(version).num_bytes
            else:
                version = publisher.ref.version
                with tempfile.TemporaryDirectory(dir=Path(base).parent) as folder:
                    began_s = time.time()
                    whole = Path(folder) / "whole"
                    write_checkpoint(whole, newest)
                    anchor = publisher.run.write_anchor(version, whole, writer="benchmark")
                num_bytes = anchor.num_bytes
            here_s = time.time() - began_s
            say(version=version, began_s=began_s, here_s=here_s, bytes=num_bytes)


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
