"""Records that a consumer cannot read: kept in the dead-letter topic with where they came from, then skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.kafka import partition_of
from shared.metrics import BAD_RECORDS

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from shared.kafka import Consumed

_MAX_ERROR = 500
_MAX_VALUE = 900_000


async def bury(producer: AIOKafkaProducer, topic: str, record: Consumed, error: str) -> None:
    """Write a record to the dead-letter topic with source, offset and error; returns once Kafka has it.

    A value too large for the topic is cut, and says so in the header `dead_cut`. Raises what the producer raises: the
    caller must not go past the record then.
    """
    BAD_RECORDS.labels(record.topic).inc()
    value = record.value or b""
    headers = [
        *((name, content) for name, content in record.headers if not name.startswith("dead_")),
        ("dead_source", f"{record.topic}/{record.partition}".encode()),
        ("dead_offset", str(record.offset).encode()),
        ("dead_error", error[:_MAX_ERROR].encode(errors="replace")),
        ("dead_attempts", b"1"),
    ]
    if len(value) > _MAX_VALUE:
        value = value[:_MAX_VALUE]
        headers.append(("dead_cut", b"1"))
    partition = partition_of((record.key or b"").decode(errors="replace"))
    await producer.send_and_wait(topic, value, key=record.key, partition=partition, headers=headers)
