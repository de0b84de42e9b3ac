"""Ctrl-C and SIGTERM over the whole life of a command: outside an event loop an exception, inside it an event."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


class Interrupts:
    """The first signal asks for an orderly end, each further one for haste."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While the block runs, SIGINT and SIGTERM come here; outside `in_loop` they raise `KeyboardInterrupt`."""
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def in_loop(self, stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
        """While the block runs in a loop, the first signal sets `stop`, further ones set `hurry`."""
        self._stop, self._hurry = stop, hurry
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    def _take(self, *_: object) -> None:
        if self._loop is None:
            raise KeyboardInterrupt
        # Not `loop.add_signal_handler`: when a loop closes, that leaves the process with the default handlers.
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._stop is None or self._hurry is None:
            return
        (self._hurry if self._stop.is_set() else self._stop).set()
