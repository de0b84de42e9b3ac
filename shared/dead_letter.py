"""Records that a consumer cannot read: kept in the dead-letter topic and on the desk, with where they came from."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from aiokafka.errors import KafkaError

from shared.kafka import partition_of, producer
from shared.metrics import BAD_RECORDS

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from shared.kafka import Consumed

_MAX_ERROR = 500
_MAX_VALUE = 900_000
"""Bytes of value, key and headers in the topic: below what a record may have, with room for what is added."""

_MAX_KEY = 1_000
_MAX_OF_HEADERS = 64_000
_A_HEADER = 16
"""Bytes that a header costs beside its name and content, at most."""

_MAX_HEADERS = 32
_MAX_HEADER = 1_000
_BURY_S = 15.0
_CLOSE_S = 2.0


class BadRecord(NamedTuple):
    """A record as the desk's functions take it (migration `letters`). No text holds what Postgres does not take.

    ``headers``: a JSON array of pairs [name, text], of which bytes that are not UTF-8 are replaced.
    """

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: str
    error: str

    @classmethod
    def of(cls, record: Consumed, error: str) -> BadRecord:
        """A record, and what is wrong with it: a word for the kind of fault, a colon, and more."""
        headers = [
            (_plain(name, _MAX_HEADER), _plain((value or b"").decode(errors="replace"), _MAX_HEADER))
            for name, value in record.headers[:_MAX_HEADERS]
        ]
        return cls(
            record.partition,
            record.offset,
            record.key,
            record.value,
            msgspec.json.encode(headers).decode(),
            _plain(error, _MAX_ERROR),
        )


def _plain(text: str, most: int) -> str:
    return text[:most].replace("\0", "\ufffd").encode(errors="replace").decode()


class Graves:
    """The dead-letter topic of a consumer. Opens its producer for the first bad record, and a new one after a failure.

    Many bad records in a row must not cost a connection each: the good ones behind them wait.
    """

    def __init__(self, bootstrap: str, topic: str, *, client_id: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._client_id = client_id
        self._producer: AIOKafkaProducer | None = None

    async def bury(self, record: Consumed, error: str) -> None:
        """Returns once Kafka has it. Raises `KafkaError`, `OSError`, `TimeoutError`: it may or may not have it then."""
        try:
            async with asyncio.timeout(_BURY_S):
                if self._producer is None:
                    self._producer = producer(self._bootstrap, client_id=self._client_id)
                    await self._producer.start()
                await bury(self._producer, self._topic, record, error)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the producer, if there is one."""
        made, self._producer = self._producer, None
        if made is not None:
            with contextlib.suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await made.stop()


async def bury(made: AIOKafkaProducer, topic: str, record: Consumed, error: str) -> None:
    """Write a record to the dead-letter topic with source, offset and error; returns once Kafka has it.

    What is too large for the topic is cut (a key, a value) or left out (headers), and says so in the header `dead_cut`.
    Raises what the producer raises: the caller must not go past the record then.
    """
    BAD_RECORDS.labels(record.topic).inc()
    value, key = record.value or b"", record.key
    own = [(name, content or b"") for name, content in record.headers if not name.startswith("dead_")]
    kept, used = list[tuple[str, bytes]](), 0
    for name, content in own:
        size = len(name.encode(errors="replace")) + len(content) + _A_HEADER
        if used + size <= _MAX_OF_HEADERS:
            kept.append((name, content))
            used += size
    headers = [
        *kept,
        ("dead_source", f"{record.topic}/{record.partition}".encode()),
        ("dead_offset", str(record.offset).encode()),
        ("dead_error", error[:_MAX_ERROR].encode(errors="replace")),
        ("dead_attempts", b"1"),
    ]
    room = _MAX_VALUE - used
    if len(value) > room or len(key or b"") > _MAX_KEY or len(kept) < len(own):
        value, key = value[:room], key and key[:_MAX_KEY]
        headers.append(("dead_cut", b"1"))
    partition = partition_of((record.key or b"").decode(errors="replace"))
    await made.send_and_wait(topic, value, key=key, partition=partition, headers=headers)
