"""How much Postgres grows by a message that is sent, pushed, acked and read: through every service, with real sockets.

Messages come at an even rate to groups whose members are all connected, each on one device, and ack what they get ten
times a second. A quarter of what comes is read.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

import asyncpg

from bench.loads import open_loop
from bench.messages import LINES
from bench.receipts_services import OURS
from bench.sockets import open_sockets
from bench.waits import until
from shared.auth import mint
from shared.statements import statements

if TYPE_CHECKING:
    import aiohttp

    from bench.figures import Figures
    from bench.receipts_services import Services
    from bench.sockets import Frame, Socket
    from deploy.local.stack import Stack

_SQL = statements(__file__)

TABLES = ("event", "outbox", "outbox_delivery", "transition", "receipt", "device_cursor", "conversation", "member")
"""What is looked at."""

GROUPS, MEMBERS, USERS = 200, 4, 200
RATE_S = 300.0
READS = 0.25

_WARM_S = 4.0
_SETTLE_S = 4.0
"""What is folded per second is written by then."""

_BATCH = 10
_ARRIVE_S = 60.0
_TIMEOUT_S = 30.0
_TOKEN_S = 3600.0
_READ_EVERY_S = 0.1


@dataclass(slots=True)
class _Seen:
    """What the sockets got, and the newest seq of each conversation that its user means to read."""

    events: int = 0
    to_read: dict[tuple[str, str], int] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def heard(self, user: str, frame: Frame, _: float) -> None:
        """A frame came in."""
        if frame.t == "event":
            self.events += 1
            if self.chance.random() < READS:
                self.to_read[user, frame.conversation_id] = frame.seq

    async def read(self, sockets: dict[str, Socket]) -> None:
        """Tell of what was read, until cancelled."""
        while True:
            await asyncio.sleep(_READ_EVERY_S)
            marks, self.to_read = self.to_read, {}
            for (user, conversation_id), seq in marks.items():
                await sockets[user].mark(conversation_id, seq)


async def measure(stack: Stack, services: Services, messages: int) -> dict[str, object]:
    """MiB for 1 M messages by table, their sum, and what was seen on the way.

    Extrapolated from so many messages; what the first ones make, a receipt and a cursor for each member, is there
    before. Raises `RuntimeError` if a message does not arrive.
    """
    groups = await _groups(services)
    users = sorted({user for members in groups.values() for user in members})
    tokens = {user: mint(services.auth_secret, user, ttl_s=_TOKEN_S) for user in users}
    seen = _Seen()
    db = await asyncpg.connect(stack.postgres_url, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
    try:
        async with (
            services.serving(OURS, ("receipts", "relay", "gateway")) as address,
            open_sockets(address, tokens, seen.heard) as sockets,
            services.door() as http,
            asyncio.TaskGroup() as tasks,
        ):
            reading = tasks.create_task(seen.read(sockets), name="read")
            await _send(services, http, list(groups), seen, round(RATE_S * _WARM_S))
            before, kinds = await _sizes(db), await _transitions(db)
            await _send(services, http, list(groups), seen, messages)
            after = await _sizes(db)
            rows = {kind: amount - kinds.get(kind, 0) for kind, amount in (await _transitions(db)).items()}
            reading.cancel()
    finally:
        await db.close(timeout=_TIMEOUT_S)
    return {
        **_figures(before, after, messages),
        "transitions_per_message": {kind: round(amount / messages, 2) for kind, amount in sorted(rows.items())},
    }


def _figures(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], messages: int
) -> dict[str, Figures | float]:
    grown = {name: after[name][0] - before[name][0] for name in TABLES}
    found = {name: round(grown[name] / messages * 1e6 / 2**20, 1) for name in TABLES}
    return {
        "mib_per_million": found,
        "mib_per_million_in_all": round(sum(found.values()), 1),
        "dead_rows": {name: float(after[name][1]) for name in TABLES if after[name][1]},
    }


async def _send(services: Services, http: aiohttp.ClientSession, groups: list[str], seen: _Seen, messages: int) -> None:
    """So many messages at the even rate; returns once every member has them and what follows is written."""
    expected = seen.events + messages * MEMBERS

    async def call(number: int, _: bool) -> None:  # noqa: FBT001 - the loop's own call
        events = [
            {
                "conversation_id": groups[(number * _BATCH + at) % len(groups)],
                "sender_id": f"growth-{(number * _BATCH + at) % len(groups)}",
                "client_msg_id": str(uuid4()),
                "body": {"text": LINES[(number + at) % len(LINES)]},
            }
            for at in range(_BATCH)
        ]
        await services.write(http, events)

    calls = round(messages / _BATCH)
    await open_loop(call, rate_s=RATE_S / _BATCH, warm_s=0.0, measure_s=calls / (RATE_S / _BATCH))
    await until(lambda: seen.events >= expected, within_s=_ARRIVE_S, what="every message")
    await asyncio.sleep(_SETTLE_S)
    await services.quiet()


async def _groups(services: Services) -> dict[str, list[str]]:
    """Conversation ids with their members; the first one has made the group."""
    found: dict[str, list[str]] = {}
    async with services.door() as http:
        for number in range(GROUPS):
            members = [f"growth-{(number + step * step * 7) % USERS}" for step in range(MEMBERS)]
            asked = {"kind": "group", "members": members, "creator_id": members[0], "title": f"group {number}"}
            async with http.post(f"{services.ingest}/v1/conversations", json=asked) as answer:
                answer.raise_for_status()
                found[(await answer.json())["conversation_id"]] = members
    return found


async def _sizes(db: asyncpg.Connection) -> dict[str, tuple[int, int]]:
    rows = await db.fetch(_SQL["sizes"], list(TABLES))
    return {row["name"]: (row["bytes"], row["dead"]) for row in rows}


async def _transitions(db: asyncpg.Connection) -> dict[str, int]:
    return {row["kind"]: row["amount"] for row in await db.fetch(_SQL["transitions"])}
