"""`serve(config)`: one replica as a process, from start to exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Coroutine

from stitch.board import BlobCache, Board, open_board
from stitch.replica.app import ReplicaApp
from stitch.replica.config import ReplicaConfig
from stitch.replica.hosts import EngineHost, host_for

Started = Callable[[ReplicaApp, int], None]


def serve(config: ReplicaConfig, *, on_listening: Started | None = None) -> None:
    """Run a replica until SIGTERM or SIGINT.

    `on_listening` is called with the app and its port once requests are taken. Raises what made
    the replica FAIL (FatalReplicaError, or UsageError for weights, board or settings that do not
    fit), after the board has been told, and OSError when the port is not to be had.
    """
    run_fast(_serve_until_signal(config, on_listening))


def run_fast(main: Coroutine[None, None, None]) -> None:
    """`asyncio.run` on uvloop where it is installed: a seventh more requests per second."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # asyncio's own loop does the same, slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def quiet_garbage_collector() -> None:
    """Keep what was imported and built so far out of the collector's sight.

    A full collection walks hundreds of thousands of objects that live as long as the process, and
    holds up every request meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def _serve_until_signal(config: ReplicaConfig, on_listening: Started | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    quiet_garbage_collector()
    await serve_until(config, host_for(config), stop, on_listening)


async def serve_until(
    config: ReplicaConfig,
    host: EngineHost,
    stop: asyncio.Event,
    on_listening: Started | None = None,
) -> None:
    """Run a replica with the engine of `host` until `stop` is set; raises as `serve` does."""
    board = await asyncio.to_thread(_open_board, config)
    app = ReplicaApp(config, host)
    failed = False
    try:
        async with app.listening() as port:
            if on_listening is not None:
                on_listening(app, port)
            await _until_stopped(asyncio.create_task(app.reconcile(board)), stop)
            await app.withdraw()
    except Exception:
        failed = True
        raise
    finally:
        await app.close(failed=failed)
        await host.stop()


def _open_board(config: ReplicaConfig) -> Board:
    cache = None
    if config.cache is not None:
        cache = BlobCache(config.cache, max_bytes=config.cache_max_bytes)
    return open_board(config.board, cache=cache, trusted_keys=config.trusted_keys)


async def _until_stopped(work: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Wait for the signal or for the failure, and raise the latter."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
