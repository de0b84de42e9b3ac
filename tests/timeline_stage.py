"""Sends judged and written by the real store, and pages read from it, without a process of ingest."""

from __future__ import annotations

import json
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import msgspec

from services.ingest.admission import admit
from services.ingest.conversations import Conversations, CreateRequest, plan
from services.ingest.writer import Rules, Writer, Written
from shared.auth import Claims
from shared.contracts.sends import SendItem
from shared.errors import WaybillError
from shared.postgres import Pool, open_pool
from shared.timeline import page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from services.ingest.admission import Send
    from services.ingest.writer import Answer
    from shared.auth import Scope
    from tests.databases import Database

KEY = b"tests-digest-key-of-32-characters"
TRACE = "a" * 32
TRACEPARENT = f"00-{TRACE}-{'b' * 16}-01"

Said = tuple[str, str | None]


@dataclass
class Stage:
    """``owner`` may do all; the pools have the roles of their names."""

    database_url: str
    owner: asyncpg.Connection
    ingest: Pool
    relay: Pool

    async def group(self, *members: str, history: str = "joined") -> str:
        """A group; the first member makes it."""
        return await self.create(CreateRequest(kind="group", members=[*members], history=history))  # type: ignore[arg-type]

    async def direct(self, one: str, other: str) -> str:
        return await self.create(CreateRequest(kind="direct", members=[one, other]))

    async def create(self, request: CreateRequest, *, size: int = 10_000) -> str:
        planned = plan(request, request.members[0])
        await Conversations(self.ingest, KEY, 5.0, group_size=size).create(planned)
        return planned.conversation_id

    async def write(self, *sends: Send, rules: Rules | None = None) -> list[Answer]:
        """Write a batch."""
        return await Writer(self.ingest, 5.0, rules).write(sends)

    async def send(self, user: str, conversation_id: str, *, rules: Rules | None = None, **fields: Any) -> Answer:
        """Write one event, by default a message."""
        (answer,) = await self.write(draft(user, conversation_id, **fields), rules=rules)
        return answer

    async def sent(self, user: str, conversation_id: str, **fields: Any) -> int:
        """Write one event that has to be written; its seq."""
        answer = await self.send(user, conversation_id, **fields)
        assert isinstance(answer, Written), answer
        return answer.seq

    async def said(self, user: str, conversation_id: str, **fields: Any) -> Said:
        """Write one event that has to be refused; the error's code and field."""
        return code(await self.send(user, conversation_id, **fields))

    async def member(self, user: str, conversation_id: str, action: str, subject: str, **fields: Any) -> int:
        return await self.sent(user, conversation_id, **member(action, subject, **fields))

    async def page(self, user: str | None, conversation_id: str, after: int = 0) -> dict[int, Any]:
        """What somebody sees (None: a service, all), by seq."""
        found = await page(self.ingest, conversation_id, user, limit=500, after=after)
        return {event["seq"]: event for event in map(json.loads, found.events)}

    async def event_id(self, conversation_id: str, seq: int) -> uuid.UUID:
        found: uuid.UUID = await self.owner.fetchval(
            "SELECT event_id FROM event WHERE conversation_id = $1 AND seq = $2", conversation_id, seq
        )
        return found

    async def age(self, conversation_id: str, interval: str, *, upto: int = 2**62) -> None:
        """Let the events that there are be older by so much."""
        await self.owner.execute(
            "UPDATE event SET created_at = created_at - $2::text::interval WHERE conversation_id = $1 AND seq <= $3",
            conversation_id,
            interval,
            upto,
        )

    async def transitions(self, conversation_id: str, kind: str) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self.owner.fetch(
            "SELECT * FROM transition WHERE conversation_id = $1 AND kind = $2 ORDER BY at, ctid", conversation_id, kind
        )
        return rows


def draft(user: str, conversation_id: str, *, scope: Scope = "user", **fields: Any) -> Send:
    """A send as it is admitted."""
    item: dict[str, Any] = {"conversation_id": conversation_id, "client_msg_id": uuid.uuid4().hex, **fields}
    if scope != "user":
        item.setdefault("sender_id", user)
    if item.get("type", "message") in ("message", "system"):
        item.setdefault("body", {"text": "hello"})
    read = msgspec.json.decode(msgspec.json.encode(item), type=SendItem)
    return admit(Claims(user, scope, None, 0.0), read, digest_key=KEY)


def member(action: str, subject: str | None = None, **fields: Any) -> dict[str, Any]:
    """The fields of a `member` event."""
    return {"type": "member", "body": {"action": action, **({"user_id": subject} if subject else {}), **fields}}


def code(answer: Answer) -> Said:
    assert isinstance(answer, WaybillError), answer
    return answer.code, answer.field


def seqs(answers: Sequence[Answer]) -> list[int]:
    return [answer.seq for answer in answers if isinstance(answer, Written)]


@asynccontextmanager
async def open_stage(database: Database, *, lanes: int = 4) -> AsyncIterator[Stage]:
    owner = await asyncpg.connect(database.owner_url)
    try:
        async with (
            open_pool(database.url("ingest"), size=lanes, name="tests") as ingest,
            open_pool(database.url("relay"), size=2, name="tests") as relay,
        ):
            yield Stage(database.owner_url, owner, ingest, relay)
    finally:
        await owner.close()
