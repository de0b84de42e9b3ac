"""What a record of events or receipts has to be: its envelope at once, its value only where somebody here wants it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shared.contracts.words import Count, Name, Seq  # noqa: TC001 - msgspec reads annotations
from shared.kafka import header

if TYPE_CHECKING:
    from shared.kafka import Consumed

_KEY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_EVENT_TYPE, _RECEIPT_TYPE = "waybill.event.", "waybill.receipt."

Id = Annotated[str, Meta(min_length=36, max_length=36)]


class Envelope(NamedTuple):
    """Whose record it is, without a look into its JSON. ``seq`` is 0 for a receipt."""

    conversation_id: str
    type: str
    seq: int


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
    key = (record.key or b"").decode()
    if not _KEY.fullmatch(key):
        raise ValueError("the key is no conversation id")
    value = record.value or b""
    if not (value.startswith(b'{"t":"') and value.endswith(b"}")):
        raise ValueError("not a frame")
    type_ = header(record.headers, "ce_type") or ""
    if type_.startswith(_RECEIPT_TYPE):
        return Envelope(key, type_, 0)
    if not type_.startswith(_EVENT_TYPE):
        raise ValueError("ce_type is neither of an event nor of a receipt")
    seq = int(header(record.headers, "seq") or "")
    if seq < 1:
        raise ValueError("seq is below 1")
    return Envelope(key, type_, seq)


def check(value: bytes, of: Envelope) -> None:
    """See that a value is what its envelope says: its bytes go to clients as they are.

    Raises `ValueError` or `msgspec.MsgspecError`.
    """
    if of.seq:
        event = _EVENT.decode(value)
        if (event.conversation_id, event.seq) != (of.conversation_id, of.seq):
            raise ValueError("not the event that key and seq name")
    elif _RECEIPT.decode(value).conversation_id != of.conversation_id:
        raise ValueError("not a receipt of the conversation that the key names")
