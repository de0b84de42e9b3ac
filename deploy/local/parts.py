"""Services and stores as parts of one stack: each can be started, watched and stopped in the same way."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Protocol

import aiohttp

from deploy.local.process import Child, Command, StartError, children_of, tail
from deploy.local.services import Service
from deploy.local.stack import Stack

READY_SECONDS = 60.0
STOP_SECONDS = 15.0
_POLL_SECONDS = 0.05
_ASK_SECONDS = 3.0


class Part(Protocol):
    """What the supervisor keeps running."""

    @property
    def name(self) -> str:
        """As people and `endpoints.json` know it."""

    @property
    def pid(self) -> int:
        """The process id, the last one if it is dead."""

    def alive(self) -> bool:
        """Whether it runs."""

    async def start(self) -> None:
        """Start it; returns when there is a process, which may not serve yet. Raises `StartError`."""

    async def ready(self) -> None:
        """Return once it serves. Raises `StartError` when it ended before that or took too long."""

    async def stop(self) -> None:
        """Ask it to end; returns once it has, killed if need be."""

    def kill(self) -> None:
        """End it at once."""


class ServicePart:
    """A service process, known to serve by its `/readyz`."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.name = service.name
        self.pid = 0
        self.log = folder / f"{service.name}.log"
        self._folder = folder
        self._log_from = 0
        self._child: Child | None = None

    @property
    def pids(self) -> list[int]:
        """Its process id and, if it has several processes, those of its children."""
        return [self.pid, *children_of(self.pid)]

    def alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.alive()

    async def start(self) -> None:
        """See `Part`."""
        command = Command(
            name=self.name,
            argv=self.service.argv,
            folder=self._folder,
            log=self.log,
            ready=b"",
            stop_seconds=STOP_SECONDS,
            environment=self.service.environment,
        )
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        try:
            self._child = Child(command)
        except OSError as error:
            raise StartError(f"{self.name} did not start: {error}") from error
        self.pid = self._child.pid

    async def ready(self) -> None:
        """See `Part`."""
        deadline = time.monotonic() + READY_SECONDS
        said = "nothing"
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while self.alive():
                if time.monotonic() > deadline:
                    raise self._failure(f"not ready after {READY_SECONDS:g} s; it said {said}")
                try:
                    async with session.get(f"{self.service.private}/readyz") as answer:
                        if answer.status == 200:
                            return
                        said = (await answer.text())[:500]
                except (aiohttp.ClientError, TimeoutError) as error:
                    said = f"nothing ({type(error).__name__})"
                await asyncio.sleep(_POLL_SECONDS)
        raise self._failure("it ended")

    async def stop(self) -> None:
        """See `Part`."""
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)

    def kill(self) -> None:
        """See `Part`."""
        for pid in self.pids if self.alive() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _failure(self, what: str) -> StartError:
        # A log that had grown too large was set aside at the start, and is shorter than it was then.
        offset = self._log_from if self.log.stat().st_size >= self._log_from else 0
        return StartError(
            f"{self.name} did not start: {what}\nlast lines of {self.log}:\n{tail(self.log, offset=offset)}"
        )


class StorePart:
    """One server of the embedded stack. The stack itself started it, and stops it after all services."""

    def __init__(self, stack: Stack, name: str) -> None:
        self.name = name
        self._stack = stack

    @property
    def pid(self) -> int:
        """See `Part`."""
        return self._stack.pids[self.name]

    def alive(self) -> bool:
        """See `Part`."""
        return self._stack.alive(self.name)

    async def start(self) -> None:
        """See `Part`; here it returns once the server serves."""
        await asyncio.to_thread(self._stack.restart, self.name)

    async def ready(self) -> None:
        """See `Part`."""

    async def stop(self) -> None:
        """Left to the stack."""

    def kill(self) -> None:
        """Left to the stack."""
