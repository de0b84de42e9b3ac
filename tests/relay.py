"""A relay in the test's own hand: what is in the outbox goes to Kafka when a test says so, left out, again or late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from shared.kafka import producer

if TYPE_CHECKING:
    from collections.abc import Collection

    import asyncpg
    from aiokafka import AIOKafkaProducer

_ROWS = """
    SELECT id, shard, conversation_id::text AS conversation_id, seq, event_id::text AS event_id, topic, type, source,
           headers, payload, to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created
    FROM outbox
    WHERE id > $1
    ORDER BY shard, id
"""


class Line:
    """From the outbox to Kafka (protocol §7), by hand. It begins after what the outbox holds when it is opened."""

    def __init__(self, connection: asyncpg.Connection, kafka: str, prefix: str) -> None:
        self._connection = connection
        self._kafka = kafka
        self._prefix = prefix
        self._producer: AIOKafkaProducer | None = None
        self._last = 0

    async def __aenter__(self) -> Self:
        self._last = await self._connection.fetchval("SELECT coalesce(max(id), 0) FROM outbox")
        self._producer = producer(self._kafka, client_id="tests-line", idempotent=False)
        await self._producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._producer is not None:
            await self._producer.stop()

    async def publish(self, *, without: Collection[int] = (), backwards: bool = False) -> list[asyncpg.Record]:
        """Publish what is new, except events with these seqs; returns what there was, for `again`."""
        rows = await self.lose()
        await self.again([row for row in rows if row["seq"] not in without], backwards=backwards)
        return rows

    async def lose(self) -> list[asyncpg.Record]:
        """Pass over what is new, as if its records were lost; returns it, for `again`."""
        rows = await self._connection.fetch(_ROWS, self._last)
        self._last = max([self._last, *(row["id"] for row in rows)])
        return rows

    async def again(self, rows: Collection[asyncpg.Record], *, backwards: bool = False) -> None:
        """Publish these rows, of each partition in order."""
        waiting = []
        for row in sorted(rows, key=lambda row: row["id"], reverse=backwards):
            more = row["headers"]
            headers = {
                "ce_specversion": "1.0",
                "ce_id": row["event_id"],
                "ce_source": row["source"],
                "ce_type": row["type"],
                "ce_subject": row["conversation_id"],
                "ce_time": row["created"],
                "content-type": "application/json",
                "seq": str(row["id"] if row["seq"] is None else row["seq"]),
                **dict(zip(more[::2], more[1::2], strict=True)),
            }
            record = (row["topic"], row["conversation_id"], row["payload"], row["shard"], headers)
            waiting.append(await self._send(*record))
        await asyncio.gather(*waiting)

    async def raw(self, topic: str, key: str, value: bytes, partition: int, headers: dict[str, str]) -> None:
        """Write one record as it is given."""
        await (await self._send(topic, key, value, partition, headers))

    async def _send(
        self, topic: str, key: str, value: bytes, partition: int, headers: dict[str, str]
    ) -> asyncio.Future[object]:
        assert self._producer is not None
        sent: asyncio.Future[object] = await self._producer.send(
            f"{self._prefix}.{topic}",
            value,
            key=key.encode(),
            partition=partition,
            headers=[(name, text.encode()) for name, text in headers.items()],
        )
        return sent
