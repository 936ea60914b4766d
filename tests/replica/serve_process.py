"""`python serve_process.py BOARD MODEL ENGINE_URL`: a replica as a process, attached to an engine.

The token is in STITCH_SERVE_ENGINE_TOKEN. Prints its address once it listens.
"""

from __future__ import annotations

import sys

from replica_kit import QUICK

from stitch.config import load
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.run import serve


def listening(app: ReplicaApp, port: int) -> None:
    print(app.url, flush=True)


if __name__ == "__main__":
    board, model, engine_url = sys.argv[1:]
    given = {"board": board, "model": model, "engine": "attach", "engine_url": engine_url}
    serve(load(ReplicaConfig, "serve", flags=QUICK | given), on_listening=listening)
