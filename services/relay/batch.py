"""From rows of the outbox to Kafka batches: keys, headers (protocol §7), one batch per topic. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from shared.clock import wire_time
from shared.kafka import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Collection

    from shared.postgres import Record

Header = tuple[str, bytes]
Queue = tuple[UUID, str]
"""A conversation and a topic: what is parked together."""

_SPEC_VERSION: Header = ("ce_specversion", b"1.0")
_CONTENT_TYPE: Header = ("content-type", b"application/json")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Postgres' own."""


class Builder(Protocol):
    """aiokafka's builder of a batch."""

    def append(self, *, timestamp: int | None, key: bytes, value: bytes, headers: list[Header]) -> object | None:
        """Add a record, or answer None if there is no room. The first one always has room, whatever its size."""

    def size(self) -> int:
        """Bytes of the batch so far."""


@dataclass(slots=True)
class Part:
    """The rows of one topic in a batch, ``from_id`` to ``to_id``."""

    topic: str
    builder: Builder
    from_id: int
    to_id: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that can never be published, and why."""

    id: int
    event_id: str
    reason: str


@dataclass(slots=True)
class Batch:
    """Rows up to ``to_id``, a part per topic; ``waiting`` are those among them whose conversation and topic are parked.

    Of the row after them: ``refused``, if it can't be published; ``unknown``, its topic, if that is not known yet.
    """

    to_id: int = 0
    rows: int = 0
    parts: dict[str, Part] = field(default_factory=dict)
    waiting: list[Record] = field(default_factory=list)
    refused: Refused | None = None
    unknown: str | None = None


def build(  # noqa: PLR0912, PLR0915, PLR0917 - a call for each row would cost more than the row
    rows: deque[Record],
    at_most: int,
    new_builder: Callable[[], Builder],
    known: Collection[str],
    parked: Collection[Queue] = (),
    most_bytes: int = MAX_RECORD_BYTES,
) -> Batch:
    """Move rows from the front of ``rows`` into a batch, until it is full or the next row can't join it.

    ``known`` are topics that are surely there, ``parked`` the queues behind whose rows others wait. A
    row that alone is over ``most_bytes`` is refused.
    A row is `(shard, id, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at)`, in which
    ``headers`` may be None and ``created_at`` is as Postgres sends it (`timestamptz_send`).
    """
    batch = Batch()
    part: Part | None = None
    ce_type = ce_source = _SPEC_VERSION
    last_topic = last_type = last_source = last_time = None
    ce_time = _SPEC_VERSION
    id_: int
    conversation_id: UUID
    seq: int | None
    event_id: UUID
    topic: str
    type_: str
    source: str
    further: list[str] | None
    payload: bytes
    created_at: bytes
    while rows and batch.rows < at_most:
        _, id_, conversation_id, seq, event_id, topic, type_, source, further, payload, created_at = rows[0]
        if parked and (conversation_id, topic) in parked:
            if len(batch.waiting) == at_most:
                break
            batch.waiting.append(rows.popleft())
            batch.to_id = id_
            continue
        if topic != last_topic:
            part, last_topic = batch.parts.get(topic), topic
        fresh = part is None
        if part is None:
            if topic not in known:
                batch.unknown = topic
                break
            part = Part(topic, new_builder(), id_, id_)
        try:
            # Most rows are like the one before them, and comparing is cheaper than writing anew.
            if type_ != last_type or source != last_source:
                ce_type, ce_source = ("ce_type", type_.encode()), ("ce_source", source.encode())
                last_type, last_source = type_, source
            if created_at != last_time:
                ce_time, last_time = _time(created_at), created_at
            key = str(conversation_id).encode()
            headers = [
                _SPEC_VERSION,
                ("ce_id", str(event_id).encode()),
                ce_source,
                ce_type,
                ("ce_subject", key),
                ce_time,
                _CONTENT_TYPE,
                ("seq", b"%d" % (id_ if seq is None else seq)),
            ]
            if further:
                headers += [(n, v.encode()) for n, v in zip(further[::2], further[1::2], strict=True)]
            added = part.builder.append(timestamp=None, key=key, value=payload, headers=headers)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            batch.refused = Refused(id_, str(event_id), f"not serialisable: {error}")
            break
        if added is None:
            break
        if fresh:
            if (size := part.builder.size()) > most_bytes:
                batch.refused = Refused(id_, str(event_id), f"too large: {size} of {most_bytes} bytes")
                break
            batch.parts[topic] = part
        part.to_id = batch.to_id = id_
        part.rows += 1
        batch.rows += 1
        rows.popleft()
    return batch


def _time(sent: bytes) -> Header:
    second, micros = divmod(int.from_bytes(sent, signed=True), 1_000_000)
    return "ce_time", b"%b%06dZ" % (_second(second), micros)


@lru_cache(maxsize=256)
def _second(second: int) -> bytes:
    # Rows come in the order of their commits, so most of these are found.
    return wire_time(_EPOCH + timedelta(seconds=second)).encode()[: -len("000000Z")]
