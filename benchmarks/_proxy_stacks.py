"""The same forwarding with other HTTP stacks, to compare: what the replica's proxy could have been.

`aiohttp`: aiohttp's server and client. `starlette`: Starlette and uvicorn with httpx. Both use the
product's gate, constraint, salt and stamps, so only the HTTP layers differ. Prints the port.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Mapping

from benchmarks._proxy_server import serving_status
from stitch.replica.body import merge_constraints, read_body
from stitch.replica.gate import Gate
from stitch.replica.run import run_fast
from stitch.replica.salt import salted
from stitch.replica.stamps import stamp_json
from stitch.types import VersionConstraint, VersionRef

DROPPED = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "keep-alive"}
)


class Rewriting:
    """What happens between the two HTTP layers."""

    def __init__(self) -> None:
        self.gate = Gate(serving_status(), lambda: None)

    async def request(self, data: bytes, headers: Mapping[str, str]) -> tuple[bytes, VersionRef]:
        body = read_body(data, "cache_salt")
        given = VersionConstraint.parse_headers(
            headers.get("x-stitch-min-version"), headers.get("x-stitch-exact-version")
        )
        ref = await self.gate.admit(merge_constraints(body.constraint, given))
        return salted(body, "cache_salt", ref), ref

    @staticmethod
    def answer(payload: bytes, ref: VersionRef) -> tuple[bytes, dict[str, str]]:
        text = str(ref.version)
        headers = {"X-Stitch-Version-Start": text, "X-Stitch-Version-End": text}
        return stamp_json(payload, ref, ref) or payload, headers


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in DROPPED}


async def aiohttp_stack(engine_url: str) -> None:
    import aiohttp
    from aiohttp import web

    rewriting = Rewriting()
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        data, ref = await rewriting.request(await request.read(), request.headers)
        async with session.request(
            request.method, engine_url + request.path_qs, data=data, headers=kept(request.headers)
        ) as upstream:
            payload, stamps = rewriting.answer(await upstream.read(), ref)
            headers = kept(upstream.headers) | stamps
            return web.Response(body=payload, status=upstream.status, headers=headers)

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def starlette_stack(engine_url: str) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    rewriting = Rewriting()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(limits=limits, timeout=None)

    async def handle(request: Request) -> Response:
        data, ref = await rewriting.request(await request.body(), request.headers)
        upstream = await client.request(
            request.method,
            engine_url + request.url.path,
            content=data,
            headers=kept(request.headers),
        )
        payload, stamps = rewriting.answer(upstream.content, ref)
        headers = kept(upstream.headers) | stamps
        return Response(payload, status_code=upstream.status_code, headers=headers)

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    # Named as TCP, or asyncio leaves Nagle's algorithm on, which costs 40 ms a request.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, backlog=1024)
    listener.listen(1024)
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-port", type=int, required=True)
    parser.add_argument("--stack", choices=["aiohttp", "starlette"], required=True)
    args = parser.parse_args()
    stack = aiohttp_stack if args.stack == "aiohttp" else starlette_stack
    run_fast(stack(f"http://127.0.0.1:{args.engine_port}"))


if __name__ == "__main__":
    main()
