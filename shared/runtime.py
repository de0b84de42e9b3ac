"""The life of a process: event loop, signals, HTTP ports, and the order in which it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from shared.logging import configure, logger
from shared.metrics import LOOP_LAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator

    from starlette.applications import Starlette

_GRACE_S = 5.0
_LAG_EVERY_S = 1.0
_COLLECT_AFTER = 10_000, 20, 50


def run(service: str, log_level: str, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run a service until SIGTERM or SIGINT sets the event that ``main`` was given and ``main`` returns.

    ``main`` owns every task that it starts (an `asyncio.TaskGroup`), and returns once they have ended. An exception
    that leaves it ends the process with a traceback in the log and code 1.
    """
    configure(service, log_level)
    _tune_collector()
    uvloop.run(_until_stopped(main))


def _tune_collector() -> None:
    # What was imported lives until the end; looking through it, and through ten thousand sessions, again and again was
    # a seventh of a gateway's time while clients came back.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    lag = asyncio.create_task(_watch_lag(), name="loop-lag")
    try:
        await main(stop)
    except* asyncio.CancelledError:
        pass
    finally:
        lag.cancel()
    logger(__name__).info("stopped")


async def _watch_lag() -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_EVERY_S)
        LOOP_LAG.set(max(0.0, time.monotonic() - before - _LAG_EVERY_S))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def http(app: Starlette, host: str, port: int) -> AsyncIterator[int]:
    """Serve an app on a port while the block runs; at its end finish the requests under way, for at most 5 s.

    Entering waits until the port is open and gives its number: 0 asks for a free one. Raises `OSError` if it cannot be.
    """
    server = _Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(_GRACE_S),
            server_header=False,
            h11_max_incomplete_event_size=64 * 1024,
        )
    )
    task = asyncio.create_task(server.serve(), name=f"http-{port}")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise OSError(f"port {port} could not be opened")
            await asyncio.sleep(0.005)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        try:
            with contextlib.suppress(SystemExit):
                await asyncio.shield(task)
        except asyncio.CancelledError:
            # Whoever cancels does not want to wait for requests, but the server must still close its sockets.
            server.force_exit = True
            await asyncio.wait([task])
            raise
