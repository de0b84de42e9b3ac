"""Plays the script on a running stack and gathers what is needed to judge it."""

from __future__ import annotations

import asyncio
import random
import secrets
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.local import endpoints
from deploy.local.endpoints import socket_of
from services.console.demo import truth
from services.console.demo.devices import Device
from services.console.demo.faults import Aim, Kill, kill
from services.console.demo.observer import Observer
from services.console.demo.recording import Recording
from services.console.demo.script import AWAY, DEVICES, KILLS, LEAVES, NAMES, PAIRS, RETURNS, Cast, Line, burst, lines
from services.console.demo.verdict import Truth, missing
from shared.auth import mint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

PATIENCE_S = 40.0
"""How long nothing may move before the rest is given up and judged as it is."""

_ENOUGH = 10
_TOKEN_S = 6 * 3600
_POLL_S = 0.2


@dataclass(slots=True)
class Outcome:
    """A run as it was. ``unfinished``: sentences about what was waited for in vain."""

    truth: Truth
    recordings: list[Recording]
    sent: int
    acked: int
    kills: list[Kill]
    seconds: float
    unfinished: list[str] = field(default_factory=list)


class Play:
    """One performance; ``play`` is called once."""

    def __init__(self, file: Path, texts: Sequence[str], messages: int, rate_s: float) -> None:
        self.observer = Observer()
        self.messages = messages
        self.sent = 0
        self.doing = "opening twelve devices"
        self._file = file
        self._texts = texts
        self._rate_s = rate_s
        self._cast = Cast(secrets.token_hex(3))
        self._stack = endpoints.read(file)
        self._devices = self._make_devices()
        self._chats: list[str] = []
        self._kills: list[Kill] = []
        self._unfinished: list[str] = []

    async def play(self) -> Outcome:
        """Open the apps, talk, kill, wait for the rest. Raises what stops a device for good."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as apps:
            await asyncio.gather(*(device.open(apps) for device in self._devices.values()))
            self._chats = await self._create_chats()
            began = loop.time()
            async with asyncio.TaskGroup() as sends:
                await self._talk(apps, sends)
                self.doing = "waiting for the last answers"
                await self._settled("answers", lambda: _now(self.messages - self.observer.acked))
                await asyncio.gather(*(device.settle(0) for device in self._devices.values()))
            seconds = loop.time() - began
            self.doing = "waiting for the last events"
            held = await truth.read(self._stack.postgres, self._chats)
            recordings = [device.recording for device in self._devices.values()]
            await self._settled("events", lambda: _now(sum(missing(held, recording) for recording in recordings)))
            self.doing = "waiting for the last ticks"
            await self._settled("ticks", self._unticked)
            for device in self._devices.values():
                await device.close()
        return Outcome(
            truth=held,
            recordings=recordings,
            sent=self.sent,
            acked=self.observer.acked,
            kills=self._kills,
            seconds=seconds,
            unfinished=self._unfinished,
        )

    def _make_devices(self) -> dict[tuple[str, str], Device]:
        urls = [socket_of(gateway) for gateway in self._stack.gateways or [self._stack.gateway]]
        made: dict[tuple[str, str], Device] = {}
        for name in NAMES:
            for kind in DEVICES:
                user = self._cast.user(name)
                token = mint(self._stack.auth_secret, user, ttl_s=_TOKEN_S)
                recording = Recording(user, self._cast.device(name, kind))
                made[name, kind] = Device(urls[len(made) % len(urls)], token, recording, self.observer)
        return made

    async def _create_chats(self) -> list[str]:
        first = self._devices[NAMES[0], DEVICES[0]].client
        group = await first.create("group", [self._cast.user(name) for name in NAMES[1:]], "Everybody")
        chats = [group.conversation_id]
        for one, other in PAIRS:
            direct = await self._devices[one, DEVICES[0]].client.create("direct", [self._cast.user(other)])
            chats.append(direct.conversation_id)
        return chats

    async def _talk(self, apps: asyncio.TaskGroup, sends: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        kills = [(round(share * self.messages), part) for share, part in KILLS]
        killing: asyncio.Task[None] | None = None
        shot = asyncio.Event()
        since_kill = burst(self.messages)
        due = loop.time()
        self.doing = "talking"
        for at, line in enumerate(lines(self._texts, self.messages, random.Random())):
            if at == round(LEAVES * self.messages):
                await self._leave()
            if at == round(RETURNS * self.messages):
                await self._devices[AWAY].open(apps)
            while kills and kills[0][0] <= at:
                if killing is not None:
                    await killing
                shot = asyncio.Event()
                killing = sends.create_task(self._kill(kills.pop(0)[1], shot))
                since_kill = 0
            if killing is not None and since_kill == 2 * burst(self.messages):
                # Enough has to be left to say after the shot: by that the recovery is measured.
                await shot.wait()
            await self._say(sends, line)
            since_kill += 1
            if since_kill < burst(self.messages):
                due = loop.time()
            else:
                due = max(due + 1 / self._rate_s, loop.time() - 0.1)
                await asyncio.sleep(max(0.0, due - loop.time()))
        if killing is not None:
            await killing

    async def _leave(self) -> None:
        device = self._devices[AWAY]
        await device.settle(PATIENCE_S)
        await device.close()

    async def _say(self, sends: asyncio.TaskGroup, line: Line) -> None:
        device = self._devices[line.name, line.device]
        await device.send(sends, self._chats[line.chat], line.text, str(uuid.uuid4()))
        self.sent += 1

    async def _kill(self, part: str, shot: asyncio.Event) -> None:
        directs = set(self._chats[1:])
        in_flight = (lambda: self.observer.unticked(directs)) if part == "receipts" else self.observer.in_flight
        self.doing = f"talking; {part} is killed"
        aim = Aim(in_flight, enough=min(_ENOUGH, burst(self.messages) // 2))
        done = await kill(part, self._file, self.observer, aim, shot)
        self.doing = "talking"
        self._kills.append(done)
        if done.recovery_s is None:
            self._unfinished.append(f"no message arrived after the kill of {part}")

    async def _unticked(self) -> int:
        behind = await truth.behind(self._stack.postgres, self._chats)
        return behind + self.observer.unticked(set(self._chats[1:]))

    async def _settled(self, what: str, left: Callable[[], Awaitable[int]]) -> None:
        """Wait until nothing is left; give up when nothing moves for `PATIENCE_S`, and note it."""
        loop = asyncio.get_running_loop()
        before, since = await left(), loop.time()
        while before > 0:
            await asyncio.sleep(_POLL_S)
            now = await left()
            if now != before:
                before, since = now, loop.time()
            elif loop.time() - since > PATIENCE_S:
                self._unfinished.append(f"{now} {what} did not come")
                return


async def _now(value: int) -> int:
    return value
