"""`waybill bench transitions`: what the log of state changes costs, by the same load with the log off and on.

Messages come at an even rate to direct chats whose members are all connected, from one socket to the other's, through
every service. Off, pushes, sends and publications are not logged; what receipts note of acks is, in both. CPU is that
of the services and of Postgres by message, from the first one until the last one is delivered and logged.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import asyncpg
import uvloop

from bench import stage
from bench.e2e import Flights
from bench.figures import Figures, medians
from bench.loads import open_loop
from bench.messages import Messages, pairs
from bench.processes import cpu_s, descendants
from bench.sockets import open_sockets
from shared.auth import mint
from shared.statements import statements

if TYPE_CHECKING:
    from bench.sockets import Frame, Socket
    from deploy.local.endpoints import Endpoints

_SQL = statements(__file__)

PARTS = ("ingest", "relay", "gateway", "receipts", "postgres")
"""Whose CPU is counted."""

FIGURES = ("cpu_us", *(f"{part}_cpu_us" for part in PARTS), "p50_ms", "p99_ms", "log_bytes", "log_rows")

_SWITCH = "WAYBILL_TRANSITION_LOG"
_LOGGED_S = 60.0
_FOLD_S = 2.5
"""What gateways fold is written by then."""

_TIMEOUT_S = 30.0
_TOKEN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds are per turn; ``rounds`` turns with the log and without, each on a fresh Waybill."""

    pool: int = 8
    users: int = 40
    chats: int = 100
    rate_s: float = 300.0
    warm_s: float = 4.0
    measure_s: float = 15.0
    rounds: int = 3


class _Turn:
    def __init__(self, of: Endpoints, db: asyncpg.Connection, settings: Settings, *, logs: bool) -> None:
        self._of = of
        self._db = db
        self._settings = settings
        self._logs = logs
        self._flights = Flights()
        self._senders: dict[str, str] = {}

    async def run(self) -> Figures:
        settings = self._settings
        chats = await stage.make_chats(self._of, pairs(settings.users, settings.chats, f"log-{os.getpid()}"))
        users = sorted({user for chat in chats for user in chat.users})
        tokens = {user: mint(self._of.auth_secret, user, ttl_s=_TOKEN_S) for user in users}
        messages = Messages(chats)
        async with open_sockets(self._of.socket, tokens, self._heard) as sockets:
            await self._load(sockets, messages, settings.warm_s)
            await self._settled()
            self._flights.begun.clear()
            size, rows, cpu = await self._bytes(), await self._kinds(), self._cpu()
            await self._load(sockets, messages, settings.measure_s)
            await self._settled()
            used = self._cpu()
            count = len(self._flights.begun)
            found = {f"{part}_cpu_us": round((used[part] - cpu[part]) / count * 1e6, 1) for part in PARTS}
            logged = {kind: amount - rows.get(kind, 0) for kind, amount in (await self._kinds()).items()}
            flights = self._flights.figures(self._flights.begun)
            return {
                "cpu_us": round(sum(found.values()), 1),
                **found,
                **flights,
                "log_bytes": round((await self._bytes() - size) / count, 1),
                "log_rows": round(sum(logged.values()) / count, 2),
                **{f"rows_{kind}": round(amount / count, 2) for kind, amount in sorted(logged.items()) if amount > 0},
            }

    def _heard(self, user: str, frame: Frame, at: float) -> None:
        sender = self._senders.get(frame.client_msg_id)
        if frame.t == "event" and sender not in (None, user):
            self._flights.arrive((user, frame.conversation_id), frame.client_msg_id, frame.seq, at)

    async def _load(self, sockets: dict[str, Socket], messages: Messages, seconds: float) -> None:
        async def call(_: int, _counts: bool) -> None:  # noqa: FBT001 - the loop's own call
            message = messages.next()
            self._senders[message.client_msg_id] = message.sender_id
            self._flights.expected.add(message.client_msg_id)
            self._flights.begun[message.client_msg_id] = await sockets[message.sender_id].send(message)

        await open_loop(call, rate_s=self._settings.rate_s, warm_s=0.0, measure_s=seconds)
        await self._flights.wait()

    async def _settled(self) -> None:
        """Wait until all is published, folded and logged. Raises `RuntimeError` if the log does not get there."""
        await asyncio.sleep(_FOLD_S)
        until = time.monotonic() + _LOGGED_S
        while await self._db.fetchval(_SQL["behind"], self._logs):
            if time.monotonic() > until:
                raise RuntimeError("the log does not get there")
            await asyncio.sleep(0.1)

    async def _bytes(self) -> int:
        return int(await self._db.fetchval(_SQL["bytes"]))

    async def _kinds(self) -> dict[str, int]:
        return {row["kind"]: row["rows"] for row in await self._db.fetch(_SQL["kinds"])}

    def _cpu(self) -> dict[str, float]:
        return {part: sum(cpu_s(one) for pid in self._of.pids_of(part) for one in descendants(pid)) for part in PARTS}


def measure(settings: Settings) -> dict[str, object]:
    """Turns with the log and without, and the medians: the result but for machine, date and command.

    Starts and stops a Waybill for each turn. Raises `RuntimeError` if a message does not arrive, or is not logged.
    """
    turns: dict[str, list[Figures]] = {"waybill": [], "without": []}
    for number in range(settings.rounds):
        for name, of_name in turns.items():
            of_name.append(_turn(settings, logs=name == "waybill"))
            stage.say(f"round {number + 1} of {settings.rounds}, {name}: {of_name[-1]}")
    found = {name: medians(of_name) for name, of_name in turns.items()}
    cost = {name: round(found["waybill"][name] - found["without"][name], 2) for name in FIGURES}
    return {"name": "transitions", **found, "cost": cost, "settings": asdict(settings), "turns": turns}


def _turn(settings: Settings, *, logs: bool) -> Figures:
    environment = {_SWITCH: "true" if logs else "false"}
    with stage.waybill(None, pool=settings.pool, environment=environment) as of:
        return uvloop.run(_on(of, settings, logs=logs))


async def _on(of: Endpoints, settings: Settings, *, logs: bool) -> Figures:
    db = await asyncpg.connect(of.postgres, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
    try:
        return await _Turn(of, db, settings, logs=logs).run()
    finally:
        await db.close(timeout=_TIMEOUT_S)
