"""The socket and the Kafka topics as an AsyncAPI 3.0 document, from the contracts' models.

Schemas are of JSON Schema draft 7, as AsyncAPI's own are. They say what the models say, but for three things that draft
7 cannot say: that a range of an `ack` ends no lower than it begins, that a time is one of the calendar, and that an
integer is written without a fraction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from shared.contracts import models, records, server_models
from shared.contracts.closes import CLOSE_CODES
from shared.kafka import PARTITIONS, Topics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel
    from pydantic_core import core_schema

Model = type["BaseModel"]
Node = dict[str, Any]

_JSON = "application/json"
_SOCKET = "#/channels/socket"

ANSWERS: dict[str, tuple[str, ...]] = {
    "Hello": ("Welcome", "Conversation", "Listed"),
    "Send": ("Sent", "Error"),
    "Create": ("Created", "Error"),
    "Ack": (),
    "Read": ("Receipt",),
    "Unread": ("Receipt",),
    "Pull": ("Page", "Error"),
    "ReceiptsRequest": ("ReceiptsPage", "Error"),
    "SettingsRequest": ("Settings", "Error"),
    "Watch": ("Receipt",),
    "TypingRequest": (),
    "PresenceRequest": ("PresenceNotice",),
    "Token": (),
    "Ping": ("Pong",),
}
"""What answers each frame. `Error` may answer any frame after `hello`; it is named where there is always an answer."""

UNASKED = ("Conversation", "Event", "Receipt", "TypingNotice", "PresenceNotice", "Error", "Expiring", "Reconnect")
"""What the server says by itself."""


class _Draft7(GenerateJsonSchema):
    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        made = super().tuple_schema(schema)
        items = made.pop("prefixItems", None)
        if items is not None:
            made |= {"items": items, "additionalItems": False}
        return made

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default", ...) is None:
            del made["default"]
        return made


def from_client() -> tuple[Model, ...]:
    """The frames from clients."""
    return _union(models.FromClient)


def to_client() -> tuple[Model, ...]:
    """The frames to clients."""
    return _union(server_models.ToClient)


def document() -> Node:
    """The whole document."""
    frames = (*from_client(), *to_client())
    topics = Topics()
    values: tuple[Model, ...] = (records.ReceiptRecord, records.AckRecord)
    headers: tuple[Model, ...] = (records.EventHeaders, records.ReceiptHeaders, records.DeadHeaders)
    return {
        "asyncapi": "3.0.0",
        "id": "urn:waybill",
        "info": {
            "title": "Waybill",
            "version": "1.0.0",
            "description": "The socket of clients and the Kafka topics. Readers ignore fields that they do not know.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": _JSON,
        "servers": _servers(),
        "channels": {
            "socket": _socket(frames),
            "events": _topic(topics.events, "EventRecord", "Every event, in `seq` order per conversation."),
            "receipts": _topic(topics.receipts, "ReceiptRecord", "Delivered and read marks as they grow."),
            "acks": _topic(topics.acks, "AckRecord", "What devices say that they store or have read."),
            "dead": _topic(topics.dead, "DeadRecord", "Records that a consumer could not read."),
        },
        "operations": {**_asked(), **_unasked(), **_written()},
        "components": {
            "messages": {**_frame_messages(frames), **_record_messages()},
            "schemas": _schemas((*frames, *values, *headers)),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
        },
    }


def _servers() -> Node:
    return {
        "gateway": {
            "host": "127.0.0.1:8400",
            "protocol": "ws",
            "description": "A gateway; its token may be in `hello` instead.",
            "security": [{"$ref": "#/components/securitySchemes/bearer"}],
        },
        "kafka": {
            "host": "{bootstrap}",
            "protocol": "kafka",
            "variables": {"bootstrap": {"default": "127.0.0.1:9092", "description": "`WAYBILL_KAFKA_BOOTSTRAP`"}},
        },
    }


def _socket(frames: Iterable[Model]) -> Node:
    codes = "\n".join(f"| {code} | {one.meaning} | {one.client} |" for code, one in CLOSE_CODES.items())
    return {
        "address": "/v1/socket",
        "servers": [{"$ref": "#/servers/gateway"}],
        "description": (
            "One JSON object per text frame; `t` names its type. The first frame is `hello`.\n\n"
            f"| close code | meaning | the client |\n|---|---|---|\n{codes}"
        ),
        "messages": {model.__name__: {"$ref": f"#/components/messages/{model.__name__}"} for model in frames},
        "bindings": {
            "ws": {
                "method": "GET",
                "headers": {
                    "type": "object",
                    "properties": {
                        "Authorization": {"type": "string", "description": "Bearer, then the token."},
                        "Sec-WebSocket-Protocol": {"type": "string", "const": "waybill.v1"},
                    },
                },
                "bindingVersion": "0.1.0",
            }
        },
        "x-close-codes": [{"code": code, **one._asdict()} for code, one in CLOSE_CODES.items()],
    }


def _topic(name: str, message: str, description: str) -> Node:
    return {
        "address": name,
        "servers": [{"$ref": "#/servers/kafka"}],
        "description": f"{description} A record may come twice.",
        "messages": {message: {"$ref": f"#/components/messages/{message}"}},
        "bindings": {"kafka": {"topic": name, "partitions": PARTITIONS, "bindingVersion": "0.5.0"}},
    }


def _asked() -> Node:
    """One operation for each frame from a client, with its answers."""
    made: Node = {}
    for model in from_client():
        operation: Node = {
            "action": "receive",
            "channel": {"$ref": _SOCKET},
            "summary": model.__doc__,
            "messages": [_of_socket(model.__name__)],
        }
        if answers := ANSWERS[model.__name__]:
            operation["reply"] = {"channel": {"$ref": _SOCKET}, "messages": [_of_socket(name) for name in answers]}
        made[f"take{model.__name__}"] = operation
    return made


def _unasked() -> Node:
    return {
        f"tell{name}": {"action": "send", "channel": {"$ref": _SOCKET}, "messages": [_of_socket(name)]}
        for name in UNASKED
    }


def _written() -> Node:
    return {
        f"write{name.capitalize()}": {"action": "send", "channel": {"$ref": f"#/channels/{name}"}}
        for name in ("events", "receipts", "acks", "dead")
    }


def _of_socket(name: str) -> Node:
    return {"$ref": f"{_SOCKET}/messages/{name}"}


def _frame_messages(frames: Iterable[Model]) -> Node:
    return {
        model.__name__: {
            "name": _tag(model),
            "title": model.__name__,
            "summary": model.__doc__,
            "payload": {"$ref": f"#/components/schemas/{model.__name__}"},
        }
        for model in frames
    }


def _record_messages() -> Node:
    key = {"type": "string", "format": "uuid", "description": "The conversation id in lower case."}
    payloads: dict[str, Node] = {
        name: {"$ref": f"#/components/schemas/{name}"} for name in ("Event", "ReceiptRecord", "AckRecord")
    }
    described = {
        "EventRecord": (payloads["Event"], records.EventHeaders, "The frame's bytes, as clients get them."),
        "ReceiptRecord": (payloads["ReceiptRecord"], records.ReceiptHeaders, records.ReceiptRecord.__doc__),
        "AckRecord": (payloads["AckRecord"], None, records.AckRecord.__doc__),
        "DeadRecord": ({}, records.DeadHeaders, "The original value, with the original key."),
    }
    made: Node = {}
    for name, (payload, headers, summary) in described.items():
        made[name] = {"name": name, "summary": summary, "payload": payload}
        if headers is not None:
            made[name]["headers"] = {"$ref": f"#/components/schemas/{headers.__name__}"}
        if name != "DeadRecord":
            made[name]["bindings"] = {"kafka": {"key": key, "bindingVersion": "0.5.0"}}
    return made


def _schemas(documented: Iterable[Model]) -> Node:
    made: Node = {}
    for model in documented:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", schema_generator=_Draft7)
        made |= schema.pop("$defs", {})
        made[model.__name__] = schema
    return made


def _tag(model: Model) -> str:
    (tag,) = get_args(model.model_fields["t"].annotation)
    return str(tag)


def _union(annotated: Any) -> tuple[Model, ...]:
    return get_args(get_args(annotated)[0])
