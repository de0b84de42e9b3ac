"""What a gateway process that is one of several knows of the process that started it.

The environment says which one it is; a pipe tells the parent where its health is, and ends when the parent does.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import socket
from typing import TYPE_CHECKING, Self

from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX = "WAYBILL_GATEWAY_PROCESS_INDEX"
"""Which of several it is, from 1 on."""
PIPE = "WAYBILL_GATEWAY_PROCESS_PIPE"
"""The number of an inherited file: a connected socket."""
METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Folder in which prometheus_client keeps the metrics of processes that are told of together."""


class Parent:
    """The process that started this one."""

    def __init__(self, index: int, pipe: socket.socket, metrics: str | None) -> None:
        self.index = index
        self._pipe = pipe
        self._metrics = metrics
        pipe.setblocking(False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """None for a process that is the only one of its gateway. Call it once: it takes the pipe over."""
        if not (number := environment.get(PIPE)):
            return None
        pipe = socket.socket(fileno=int(number))
        os.set_inheritable(pipe.fileno(), False)
        return cls(int(environment[INDEX]), pipe, environment.get(METRICS))

    def opened(self, private_port: int) -> None:
        """Say where this process's health and metrics are. A parent that has died is for `watch` to notice."""
        try:
            self._pipe.send(f"{private_port}\n".encode())
        except OSError as error:
            logger(__name__).warning("the parent was not told", error=str(error))

    async def watch(self, stop: asyncio.Event) -> None:
        """Set ``stop`` when the parent has died, however it did."""
        loop = asyncio.get_running_loop()
        with self._pipe:
            try:
                while await loop.sock_recv(self._pipe, 64):
                    pass
            except OSError as error:
                logger(__name__).warning("the pipe to the parent broke", error=str(error))
        logger(__name__).warning("the parent has died; draining")
        if self._metrics is not None:
            # Nobody else is left to do it. What is open stays usable until the end.
            atexit.register(shutil.rmtree, self._metrics, ignore_errors=True)
        stop.set()
