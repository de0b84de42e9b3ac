"""The records of the Kafka topics as pydantic models: values, and headers as text (protocol §7)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictStr

from shared.contracts.frames import MAX_RANGES
from shared.contracts.models import Contract, Count, Given, Id, Name, Range, Time, Traceparent
from shared.contracts.server_models import Receipt

Number = Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]*)$", description="in decimal")]


class ReceiptRecord(Receipt):
    """The value of the receipts topic. `device_id`: a refused mark, for that device of the user alone.

    Of the kind `settings`: the user's own settings of the conversation have changed; the marks are the present ones.
    """

    kind: Literal["delivered", "read", "unread", "settings"]
    cause: StrictStr
    device_id: Given[Name] = None


class AckRecord(Contract):
    """The value of the acks topic: `ranges` of a `delivered`, `seq` and `version` of a `read` or `unread`."""

    conversation_id: Id
    user_id: Name
    device_id: Name
    kind: Literal["delivered", "read", "unread"]
    ranges: Given[Annotated[list[Range], Field(min_length=1, max_length=MAX_RANGES)]] = None
    seq: Given[Count] = None
    version: Given[Count] = None
    at: Time


class CloudEvent(Contract):
    """CloudEvents 1.0 in binary mode, and what each record of an outbox carries besides."""

    ce_specversion: Literal["1.0"]
    ce_id: Annotated[Id, Field(description="Tells a record that comes twice.")]
    ce_subject: Annotated[Id, Field(description="The conversation id, as in the key.")]
    ce_time: Time
    content_type: Annotated[Literal["application/json"], Field(alias="content-type")]
    late: Annotated[Given[Literal["1"]], Field(description="A dead letter that was retried: out of its place.")] = None


class EventHeaders(CloudEvent):
    """The headers of the events topic."""

    ce_source: Literal["/waybill/ingest"]
    ce_type: Literal[
        "waybill.event.message",
        "waybill.event.edit",
        "waybill.event.recall",
        "waybill.event.delete",
        "waybill.event.member",
        "waybill.event.conversation",
        "waybill.event.system",
    ]
    seq: Annotated[Number, Field(description="The event's.")]
    traceparent: Given[Traceparent] = None


class ReceiptHeaders(CloudEvent):
    """The headers of the receipts topic."""

    ce_source: Literal["/waybill/receipts"]
    ce_type: Literal[
        "waybill.receipt.delivered", "waybill.receipt.read", "waybill.receipt.unread", "waybill.receipt.settings"
    ]
    seq: Annotated[Number, Field(description="The outbox id: it only grows within a partition.")]
    user_id: Name
    kind: Literal["delivered", "read", "unread", "settings"]


class DeadHeaders(Contract):
    """The headers of the dead-letter topic, beside those of the original record."""

    dead_source: Annotated[StrictStr, Field(pattern=r"^.+/[0-9]+$", description="Topic and partition.")]
    dead_offset: Number
    dead_error: StrictStr
    dead_attempts: Number
    dead_cut: Annotated[
        Given[Literal["1"]], Field(description="It was too large: value or key are cut, or headers left out.")
    ] = None
