"""The replica's proxy alone, in front of a stub engine, as it runs in service. Prints its port.

Gate, constraint, salt, stamps, headers and metrics are the product's own code; only the reconciler
is missing, so that version 3 of a run is served all the time.
"""

from __future__ import annotations

import argparse
import asyncio

from aiohttp import web

from stitch.engines.port import EngineDescription
from stitch.replica.engine_http import EngineClient
from stitch.replica.gate import Gate
from stitch.replica.proxy import Proxy
from stitch.replica.replica_metrics import ReplicaMetrics
from stitch.replica.routes import RouteTable
from stitch.replica.run import quiet_garbage_collector, run_fast
from stitch.replica.state import ReplicaStatus
from stitch.types import ReplicaState, VersionRef

REF = VersionRef("bench", 3)


def serving_status() -> ReplicaStatus:
    """A replica that serves version 3 of run `bench`."""
    status = ReplicaStatus(replica="bench", run=REF.run, applied=REF.version, newest=REF.version)
    status.caught_up = True
    status.engine = EngineDescription(
        engine="stub",
        boot="1",
        ref=REF,
        schema_digest="0" * 32,
        state="ready",
        salt_field="cache_salt",
    )
    status.move(ReplicaState.SERVING)
    return status


async def serve(engine_port: int) -> None:
    quiet_garbage_collector()
    status = serving_status()
    gate = Gate(status, lambda: None)
    client = EngineClient(f"http://127.0.0.1:{engine_port}")
    proxy = Proxy(status, gate, ReplicaMetrics(status, gate), client, max_body_bytes=256 * 2**20)
    table = RouteTable(())

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await proxy.forward(request, table.route(request.raw_path))

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-port", type=int, required=True)
    run_fast(serve(parser.parse_args().engine_port))


if __name__ == "__main__":
    main()
