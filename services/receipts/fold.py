"""A batch of acks as the few changes that it comes to: pure, one element per device, marks one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.receipts.records import Delivered, Unread
from shared.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.receipts.marks import MarkKind
    from services.receipts.records import Ack
    from shared.kafka import Consumed


@dataclass(frozen=True, slots=True)
class Held:
    """All that a device said it stores. Ids are in lower case."""

    conversation_id: str
    user_id: str
    device_id: str
    ranges: RangeSet


@dataclass(frozen=True, slots=True)
class Mark:
    """A proposal of a read mark; refused ones are answered to the device.

    ``partition``, ``offset``: of its record, if it comes from the topic.
    """

    conversation_id: str
    user_id: str
    device_id: str
    kind: MarkKind
    version: int
    seq: int
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """``held`` has each (conversation, user, device) once; ``marks`` are in the order of arrival."""

    held: list[Held]
    marks: list[Mark]


def fold(acks: Iterable[Ack], records: Sequence[Consumed] | None = None) -> Changes:
    """What a batch comes to. A device's ranges are joined once for the whole batch: a union per ack would be square.

    ``records``: of the acks, in their order, where they come from the topic.
    """
    pairs: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    marks: list[Mark] = []
    for at, ack in enumerate(acks):
        conversation_id = ack.conversation_id.lower()
        if isinstance(ack, Delivered):
            ranges = pairs.setdefault((conversation_id, ack.user_id, ack.device_id), [])
            ranges.extend(ack.ranges)
            continue
        kind: MarkKind = "unread" if isinstance(ack, Unread) else "read"
        place = (None, None) if records is None else (records[at].partition, records[at].offset)
        marks.append(Mark(conversation_id, ack.user_id, ack.device_id, kind, ack.version, ack.seq, *place))
    return Changes([Held(*key, RangeSet(ranges)) for key, ranges in pairs.items()], marks)
