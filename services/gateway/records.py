"""What a record of events or receipts has to be: its envelope at once, its value only where somebody here wants it."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from services.gateway.events import EVENT_TYPE
from shared.contracts.words import Count, Name, Seq  # noqa: TC001 - msgspec reads annotations

if TYPE_CHECKING:
    from shared.kafka import Consumed

_KEY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_RECEIPT_TYPE = "waybill.receipt."

Id = Annotated[str, Meta(min_length=36, max_length=36)]


class Envelope(NamedTuple):
    """Whose record it is, without a look into its JSON.

    ``seq``: of a receipt its id in the outbox, 0 if it has none. ``committed``: seconds since the epoch, 0 if not told.
    """

    conversation_id: str
    type: str
    seq: int
    is_event: bool
    committed: float


class _Event(msgspec.Struct, frozen=True, tag_field="t", tag="event"):
    conversation_id: Id
    seq: Seq
    event_id: Id
    sender_id: Name


class _Receipt(msgspec.Struct, frozen=True, tag_field="t", tag="receipt"):
    conversation_id: Id
    user_id: Name
    delivered_seq: Count
    read_seq: Count
    read_version: Count


_EVENT = msgspec.json.Decoder(_Event)
_RECEIPT = msgspec.json.Decoder(_Receipt)


def envelope(record: Consumed) -> Envelope:
    """Key, type and seq of a record. Raises `ValueError` for what can be no event and no receipt."""
    key = _conversation_id(record.key or b"")
    value = record.value or b""
    if not (value.startswith(b'{"t":"') and value.endswith(b"}")):
        raise ValueError("not a frame")
    headers = dict(record.headers)
    type_ = _text(headers.get("ce_type") or b"")
    if type_.startswith(_RECEIPT_TYPE):
        seq = headers.get("seq") or b""
        return Envelope(key, type_, int(seq) if seq.isdigit() else 0, is_event=False, committed=0.0)
    if not type_.startswith(EVENT_TYPE):
        raise ValueError("ce_type is neither of an event nor of a receipt")
    seq_ = int(headers.get("seq") or b"")
    if seq_ < 1:
        raise ValueError("seq is below 1")
    return Envelope(key, type_, seq_, is_event=True, committed=_seconds(headers.get("ce_time")))


@lru_cache(64)
def _text(value: bytes) -> str:
    return value.decode()


@lru_cache(65_536)
def _conversation_id(key: bytes) -> str:
    text = key.decode()
    if not _KEY.fullmatch(text):
        raise ValueError("the key is no conversation id")
    return text


def _seconds(time: bytes | None) -> float:
    try:
        return 0.0 if time is None else datetime.fromisoformat(time.decode()).timestamp()
    except ValueError:
        return 0.0


def check(value: bytes, of: Envelope) -> None:
    """See that a value is what its envelope says: its bytes go to clients as they are.

    Raises `ValueError` or `msgspec.MsgspecError`.
    """
    if of.is_event:
        event = _EVENT.decode(value)
        if (event.conversation_id, event.seq) != (of.conversation_id, of.seq):
            raise ValueError("not the event that key and seq name")
    elif _RECEIPT.decode(value).conversation_id != of.conversation_id:
        raise ValueError("not a receipt of the conversation that the key names")
