"""Records of the topic of acks (protocol §7): what a device stores, or proposes as its user's read mark."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - msgspec reads annotations
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from shared.contracts.decode import decode
from shared.contracts.frames import MAX_RANGES
from shared.contracts.words import Count, Seq, is_name, is_uuid
from shared.errors import BadRequestError

if TYPE_CHECKING:
    from shared.kafka import Consumed


class _Ack(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    conversation_id: str
    user_id: str
    device_id: str
    at: Annotated[datetime, Meta(tz=True)]


class Delivered(_Ack, frozen=True, tag="delivered"):
    """Inclusive ranges that are stored on the device now."""

    ranges: Annotated[list[tuple[Seq, Seq]], Meta(min_length=1, max_length=MAX_RANGES)]

    def __post_init__(self) -> None:
        for at, (low, high) in enumerate(self.ranges):
            if low > high:
                raise BadRequestError("the range ends before it begins", field=f"ranges.{at}")


class Read(_Ack, frozen=True, tag="read"):
    """A read mark that moves forward."""

    seq: Seq
    version: Count


class Unread(_Ack, frozen=True, tag="unread"):
    """A read mark with a version of its own, which may go back."""

    seq: Count
    version: Seq


Ack = Delivered | Read | Unread

_DECODER: msgspec.json.Decoder[Ack] = msgspec.json.Decoder(Ack)


_name = lru_cache(65_536)(is_name)
"""The same few names come again and again: a look-up costs a quarter of the pattern, which would be half of a parse."""

_uuid = lru_cache(65_536)(is_uuid)

_LONGEST = 64
"""Characters of an id. What is longer is not looked up: it would be kept."""


def fault(error: BadRequestError) -> str:
    """What is wrong with a record, as dead letters say it."""
    return f"{error.field}: {error.message}"


def parse(record: Consumed) -> Ack:
    """A record as an ack. Raises `BadRequestError` for a shape that §7 does not allow, and for another's key."""
    ack = decode(_DECODER, record.value or b"", fallback="value")
    if len(ack.conversation_id) > _LONGEST or not _uuid(ack.conversation_id):
        raise BadRequestError("expected a UUID", field="conversation_id")
    if len(ack.user_id) > _LONGEST or not _name(ack.user_id):
        raise BadRequestError("expected a user id", field="user_id")
    if len(ack.device_id) > _LONGEST or not _name(ack.device_id):
        raise BadRequestError("expected a device id", field="device_id")
    if record.key != ack.conversation_id.lower().encode():
        raise BadRequestError("the key is not the conversation id", field="key")
    return ack
