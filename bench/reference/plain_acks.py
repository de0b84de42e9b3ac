"""The reference of `waybill bench receipts`: a consumer that writes one guarded upsert per ack, as it is usually built.

A program of its own, `python -m bench.reference.plain_acks`, with a topic of acks in the form that Waybill's gateways
write. Each ack is one upsert of the user's row, committed by itself, that lets a mark only rise. After every fetch the
consumer commits its offsets to Kafka.

It is tuned within its design, and spared what does not belong to it:

- the event loop is uvloop, values are decoded by msgspec, statements are prepared once per connection, and an upsert
  that changes nothing writes nothing;
- room on the pages for updates in place;
- with ``connections`` above 1 that many acks are written at a time; those of one partition stay in order;
- it keeps the highest seq of an ack and nothing of devices or ranges: a hole is not seen, a mark may be too high;
- it knows no membership, no head and no `unread`, and says nothing of what it refuses;
- the receipt is sent to Kafka after the commit (`--publish`), or not at all: one that dies in between leaves it unsent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import asyncpg
import msgspec
import uvloop
from aiokafka import AIOKafkaConsumer
from msgspec import Meta

from shared.kafka import producer
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokafka import AIOKafkaProducer
    from asyncpg.prepared_stmt import PreparedStatement

    from shared.kafka import Consumed

_SQL = statements(__file__)

_POLL_MS = 500
_MOST = 2_000
_SAY_EVERY_S = 0.2
_TIMEOUT_S = 30.0
_CLOSE_S = 5.0


class Ack(msgspec.Struct, frozen=True):
    """What is read of an ack."""

    conversation_id: str
    user_id: str
    kind: str
    ranges: Annotated[list[tuple[int, int]], Meta(min_length=1)] | None = None
    seq: int = 0

    @property
    def mark(self) -> int:
        """The seq that the user's mark may rise to."""
        return self.seq if self.ranges is None else max(high for _, high in self.ranges)


_ACK = msgspec.json.Decoder(Ack)


class Writer:
    """One connection. ``publish``: the topic that is told of each change; None: nobody is told."""

    def __init__(
        self, delivered: PreparedStatement, read: PreparedStatement, made: AIOKafkaProducer | None, publish: str | None
    ) -> None:
        self._delivered = delivered
        self._read = read
        self._producer = made
        self._publish = publish
        self.done = 0

    async def write(self, records: Sequence[Consumed]) -> None:
        """Write them one after the other."""
        for record in records:
            ack = _ACK.decode(record.value or b"")
            statement = self._delivered if ack.kind == "delivered" else self._read
            row = await statement.fetchrow(ack.conversation_id, ack.user_id, ack.mark)
            if row is not None and self._producer is not None:
                await self._producer.send(
                    self._publish,
                    receipt(ack, row["delivered_seq"], row["read_seq"]),
                    key=record.key,
                    partition=record.partition,
                    headers=[
                        ("ce_type", f"waybill.receipt.{ack.kind}".encode()),
                        ("user_id", ack.user_id.encode()),
                        ("kind", ack.kind.encode()),
                    ],
                )
            self.done += 1


def receipt(ack: Ack, delivered_seq: int, read_seq: int) -> bytes:
    """The `receipt` frame that tells of it."""
    return (
        f'{{"t":"receipt","conversation_id":"{ack.conversation_id}","user_id":"{ack.user_id}",'
        f'"delivered_seq":{delivered_seq},"read_seq":{read_seq},"read_version":0,"kind":"{ack.kind}","cause":"ack"}}'
    ).encode()


async def serve(options: argparse.Namespace) -> None:
    """Consume until cancelled, from where the group is in the topic, else from its beginning."""
    made = producer(options.kafka, client_id="bench-plain") if options.publish else None
    consumer = AIOKafkaConsumer(
        options.topic,
        bootstrap_servers=options.kafka,
        client_id="bench-plain",
        group_id=options.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=500,
    )
    connections = [
        await asyncpg.connect(
            options.postgres,
            timeout=_TIMEOUT_S,
            command_timeout=_TIMEOUT_S,
            server_settings={"application_name": "bench plain"},
        )
        for _ in range(options.connections)
    ]
    try:
        writers = [
            Writer(await one.prepare(_SQL["delivered"]), await one.prepare(_SQL["read"]), made, options.publish)
            for one in connections
        ]
        if made is not None:
            await made.start()
        await consumer.start()
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_say(writers), name="say")
            while True:
                await _step(consumer, writers)
    finally:
        await consumer.stop()
        if made is not None:
            await made.stop()
        for one in connections:
            await one.close(timeout=_CLOSE_S)


async def _step(consumer: AIOKafkaConsumer, writers: Sequence[Writer]) -> None:
    fetched = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_MOST)
    shares: list[list[Consumed]] = [[] for _ in writers]
    for place, records in fetched.items():
        shares[place.partition % len(writers)].extend(records)
    await asyncio.gather(*(writer.write(share) for writer, share in zip(writers, shares, strict=True) if share))
    if fetched:
        await consumer.commit()


async def _say(writers: Sequence[Writer]) -> None:
    """Tell how many acks are committed, a few times a second."""
    while True:
        print(sum(writer.done for writer in writers), flush=True)
        await asyncio.sleep(_SAY_EVERY_S)


async def make(postgres_url: str) -> None:
    """Make its table anew."""
    connection = await asyncpg.connect(postgres_url, timeout=_TIMEOUT_S)
    try:
        await connection.execute(_SQL["schema"], timeout=_TIMEOUT_S)
    finally:
        await connection.close(timeout=_CLOSE_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until it is killed."""
    made = argparse.ArgumentParser(prog="plain_acks")
    for name in ("postgres", "kafka", "topic", "group"):
        made.add_argument(f"--{name}", required=True)
    made.add_argument("--publish")
    made.add_argument("--connections", type=int, default=1)
    uvloop.run(serve(made.parse_args(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
