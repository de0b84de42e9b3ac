"""One of several gateway processes, as the parent sees it: started, asked for its health, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from services.gateway.parent import INDEX, PIPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ASK_S = 2.5
"""Longer than a check of the child itself may take, so that it can say what fails."""

_LINE = 64


class _Answer(msgspec.Struct):
    failing: dict[str, str] = {}


class Child:
    """``argv`` and ``environment`` are of its own process; ``watch_s``: seconds between two questions whether it lives.

    One that does not say where its health is within ``up_s``, or does not answer ``misses`` questions in a row, is
    to be killed: a process whose loop stands still does not end by itself.
    """

    def __init__(
        self,
        index: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        up_s: float = 60.0,
        watch_s: float = 5.0,
        misses: int = 6,
    ) -> None:
        self.index = index
        self.pid = 0
        self.private: str | None = None
        """Base address of its health; None until it has told."""
        self._argv = argv
        self._environment = environment
        self._up_s = up_s
        self._watch_s = watch_s
        self._misses = misses
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: socket.socket | None = None

    async def start(self) -> None:
        """Start it anew. Raises `OSError`."""
        self.private = None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            environment = {**self._environment, INDEX: str(self.index), PIPE: str(theirs.fileno())}
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    # A terminal's Ctrl-C reaches the parent alone, which stops all.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._pipe = ours
        self.pid = self._process.pid

    async def ended(self) -> int:
        """Wait for its end; the exit code, or the signal's number below 0."""
        assert self._process is not None
        return await self._process.wait()

    async def failed(self, http: aiohttp.ClientSession, up: Callable[[], None]) -> str:
        """Return, with a word for why, once it is to be killed; ``up`` is called once it told where its health is."""
        try:
            async with asyncio.timeout(self._up_s):
                self.private = f"http://127.0.0.1:{await self._told()}"
        except TimeoutError:
            return "not_up"
        up()
        missed = 0
        while missed < self._misses:
            await asyncio.sleep(self._watch_s)
            missed = 0 if await self._lives(http) else missed + 1
        return "hung"

    async def ready(self, http: aiohttp.ClientSession) -> str | None:
        """None when it serves, else what is wrong."""
        if self.private is None:
            return "not up"
        try:
            async with asyncio.timeout(ASK_S), http.get(f"{self.private}/readyz") as answer:
                if answer.status == 200:
                    return None
                failing = msgspec.json.decode(await answer.read(), type=_Answer).failing
        except TimeoutError:
            return f"no answer in {ASK_S} s"
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            return f"no answer: {type(error).__name__}"
        return "; ".join(f"{name}: {what}" for name, what in failing.items()) or "not ready"

    async def stop(self, grace_s: float) -> bool:
        """Ask it to end, wait ``grace_s``, then kill it; whether it ended by itself."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        """End it at once; returns when it is gone."""
        self.kill_now()
        await self.ended()

    def kill_now(self) -> None:
        """End it at once if it runs, and forget its pipe."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self.private = None

    async def _told(self) -> int:
        assert self._pipe is not None
        said = b""
        loop = asyncio.get_running_loop()
        while not said.endswith(b"\n"):
            if not (more := await loop.sock_recv(self._pipe, _LINE)):
                # It closed the pipe without a word; most likely it is about to end.
                await asyncio.Event().wait()
            said += more
        return int(said)

    async def _lives(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with asyncio.timeout(self._watch_s), http.get(f"{self.private}/healthz") as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False
