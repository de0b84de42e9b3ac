"""Conversations, events, acks and marks written as ingest and receipts write them, without running either."""

import itertools
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import msgspec

from services.ingest.admission import admit
from services.ingest.conversations import Conversations, CreateRequest, plan
from services.ingest.writer import Writer, Written
from shared.auth import Claims
from shared.contracts.sends import SendItem
from shared.postgres import Pool, open_pool
from tests.databases import Database

DIGEST_KEY = b"tests-digest-key-of-32-characters"
SERVICE = Claims("tests", "service", None, 0.0)

_names = itertools.count()


def user(name: str) -> str:
    """A user id that no other test has."""
    return f"{name}.{next(_names)}.{uuid.uuid4().hex[:6]}"


@dataclass
class Rows:
    """What a database is filled with; nothing is published."""

    database: Database
    owner: asyncpg.Connection
    ingest_pool: Pool
    receipts_pool: Pool

    async def group(self, *members: str, title: str = "t", history: str = "joined") -> str:
        """A group; the first member makes it."""
        return await self._create(CreateRequest(kind="group", members=[*members], title=title, history=history))  # type: ignore[arg-type]

    async def direct(self, one: str, other: str) -> str:
        return await self._create(CreateRequest(kind="direct", members=[one, other]))

    async def _create(self, request: CreateRequest) -> str:
        planned = plan(request, request.members[0])
        await Conversations(self.ingest_pool, DIGEST_KEY, 5.0).create(planned)
        return planned.conversation_id

    async def write(
        self, conversation_id: str, sender: str, body: Any = None, type_: str = "message", target: int | None = None
    ) -> int:
        """Write one event; its seq."""
        (seq,) = await self._write(conversation_id, sender, [({"x": 1} if body is None else body, type_, target)])
        return seq

    async def messages(self, conversation_id: str, sender: str, count: int) -> list[int]:
        """Write so many messages in one transaction; their seqs."""
        return await self._write(conversation_id, sender, [({"n": n}, "message", None) for n in range(count)])

    async def member(self, conversation_id: str, sender: str, action: str, subject: str | None = None) -> int:
        body = {"action": action} | ({} if subject is None else {"user_id": subject})
        return await self.write(conversation_id, sender, body, "member")

    async def _write(self, conversation_id: str, sender: str, events: list[tuple[Any, str, int | None]]) -> list[int]:
        sends = [
            admit(SERVICE, _item(conversation_id, sender, body, type_, target), digest_key=DIGEST_KEY)
            for body, type_, target in events
        ]
        written = await Writer(self.ingest_pool, 5.0).write(sends)
        assert all(isinstance(one, Written) for one in written), written
        return [one.seq for one in written if isinstance(one, Written)]

    async def mark(
        self,
        conversation_id: str,
        user_id: str,
        *,
        device_id: str = "phone",
        held: str | None = None,
        read: int | None = None,
    ) -> None:
        """Apply what a device holds, or a read mark."""
        topic = uuid.uuid4().hex
        await self.owner.execute("INSERT INTO ack_offset VALUES ($1, 0, 'c', 0)", topic)
        whose = [[conversation_id], [user_id], [device_id]]
        await self.receipts_pool.fetch(
            "SELECT * FROM apply_acks($1, 'c', '{0}', '{0}', '{1}', $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            topic,
            *([*whose, [held]] if held else [[]] * 4),
            *([*whose, ["read"], [0], [read]] if read else [[]] * 6),
        )


def _item(conversation_id: str, sender: str, body: Any, type_: str, target: int | None) -> SendItem:
    fields = {
        "conversation_id": conversation_id,
        "sender_id": sender,
        "client_msg_id": uuid.uuid4().hex,
        "type": type_,
        "target_seq": target,
    }
    if type_ not in ("recall", "delete"):
        fields["body"] = msgspec.Raw(json.dumps(body).encode())
    return SendItem(**fields)


@asynccontextmanager
async def open_rows(database: Database) -> AsyncIterator[Rows]:
    owner = await asyncpg.connect(database.owner_url)
    try:
        async with (
            open_pool(database.url("ingest"), size=2, name="tests") as ingest,
            open_pool(database.url("receipts"), size=1, name="tests") as receipts,
        ):
            yield Rows(database, owner, ingest, receipts)
    finally:
        await owner.close()
