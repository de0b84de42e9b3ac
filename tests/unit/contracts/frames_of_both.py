"""One or more good values of every model of the contracts, by its name."""

from __future__ import annotations

from typing import Any

ID = "0198c2a4-0000-7000-8000-00000000000a"
NOW = "2026-11-30T02:00:00.000001Z"

FROM_CLIENT: dict[str, list[dict[str, Any]]] = {
    "Hello": [
        {"t": "hello", "device_id": "phone"},
        {
            "t": "hello",
            "device_id": "phone",
            "token": "x",
            "client": "a/1",
            "sync": "live",
            "cursors": {ID: 5, "a": [5, ID.upper()], "b": [5, None]},
            "since": "s",
        },
    ],
    "Send": [
        {"t": "send", "rid": "1", "conversation_id": ID, "client_msg_id": "m", "body": {"a": [1.5, None]}},
        {
            "t": "send",
            "rid": "1",
            "conversation_id": ID.upper(),
            "client_msg_id": "m",
            "type": "recall",
            "target_seq": 1,
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        },
    ],
    "Create": [
        {"t": "create", "rid": "1", "kind": "direct", "members": ["ann"]},
        {
            "t": "create",
            "rid": "1",
            "kind": "group",
            "members": ["ann"],
            "title": "T",
            "conversation_id": ID,
            "history": "all",
        },
    ],
    "Ack": [{"t": "ack", "conversation_id": ID, "ranges": [[1, 2], [4, 4]]}],
    "Read": [
        {"t": "read", "conversation_id": ID, "seq": 1},
        {"t": "read", "conversation_id": ID, "seq": 1, "version": 0},
    ],
    "Unread": [{"t": "unread", "conversation_id": ID, "seq": 0, "version": 1}],
    "Pull": [
        {"t": "pull", "rid": "1", "conversation_id": ID, "after": 0, "limit": 5},
        {"t": "pull", "rid": "1", "conversation_id": ID, "before": 9, "after": None},
    ],
    "ReceiptsRequest": [
        {"t": "receipts", "rid": "1", "conversation_id": ID, "seq": 5},
        {
            "t": "receipts",
            "rid": "1",
            "conversation_id": ID.upper(),
            "seq": 5,
            "state": "unread",
            "after": "ann",
            "limit": 500,
        },
    ],
    "SettingsRequest": [
        {"t": "settings", "rid": "1", "conversation_id": ID, "muted": True},
        {"t": "settings", "rid": "1", "conversation_id": ID.upper(), "muted": False, "archived": True},
        {"t": "settings", "rid": "1", "conversation_id": ID, "archived": False, "muted_until": None},
        {"t": "settings", "rid": "1", "conversation_id": ID, "muted": True, "muted_until": "2026-12-01T08:00:00+01:00"},
    ],
    "Watch": [{"t": "watch", "conversation_id": ID, "on": False}],
    "TypingRequest": [{"t": "typing", "conversation_id": ID}],
    "PresenceRequest": [{"t": "presence", "users": []}, {"t": "presence", "users": ["ann", "bob"]}],
    "Token": [{"t": "token", "token": "t"}],
    "Ping": [{"t": "ping"}, {"t": "ping", "rid": "1"}],
}

_EVENT = {
    "conversation_id": ID,
    "seq": 1,
    "event_id": ID,
    "type": "message",
    "sender_id": "ann",
    "client_msg_id": "m",
    "body": {"text": "x"},
    "created_at": NOW,
}
_RECEIPT = {
    "t": "receipt", "conversation_id": ID, "user_id": "ann", "delivered_seq": 5, "read_seq": 3, "read_version": 0
}  # fmt: skip

TO_CLIENT: dict[str, list[dict[str, Any]]] = {
    "Welcome": [
        {
            "t": "welcome",
            "session_id": ID,
            "user_id": "ann",
            "device_id": "phone",
            "server_time": NOW,
            "limits": {"frame_bytes": 1, "window": 256, "resend_s": 0.5, "heartbeat_s": 25, "sends_per_s": limit},
        }
        for limit in (None, 50, 0.5)
    ],
    "Conversation": [
        {
            "t": "conversation",
            "conversation_id": ID,
            "kind": "direct",
            "title": None,
            "role": "member",
            "head": 9,
            "visible": [[1, 4], [6, None]],
            "cursor": 3,
            "delivered_seq": 0,
            "read_seq": 0,
            "read_version": 0,
            "unread": 9,
            "updated_at": NOW,
            "muted": False,
            "archived": False,
            **more,
        }
        for more in ({}, {"reset": True}, {"muted": True, "archived": True}, {"muted": True, "muted_until": NOW})
    ],
    "Listed": [
        {"t": "listed", "count": 0, "since": "s"},
        {"t": "listed", "count": 2, "since": "s", "unread": 5, "muted_unread": 0},
    ],
    "Event": [
        {"t": "event", **_EVENT},
        {
            "t": "event",
            **_EVENT,
            "type": "edit",
            "body": None,
            "target_seq": 1,
            "edited_by": 2,
            "recalled_by": 3,
            "deleted_by": 4,
        },
    ],
    "Sent": [
        {
            "t": "sent",
            "rid": "1",
            "conversation_id": ID,
            "client_msg_id": "m",
            "event_id": ID,
            "seq": 1,
            "created_at": NOW,
            "duplicate": False,
        }
    ],
    "Created": [{"t": "created", "rid": "1", "conversation_id": ID, "existing": True}],
    "Page": [
        {"t": "page", "rid": "1", "conversation_id": ID, "events": [_EVENT], "next": 1, "head": 9, "complete": False}
    ],
    "Receipt": [_RECEIPT],
    "ReceiptsPage": [
        {
            "t": "receipts",
            "rid": "1",
            "conversation_id": ID,
            "seq": 5,
            "members": 2,
            "delivered": 2,
            "read": 1,
            "users": users,
            "next": last,
        }
        for users, last in (
            ([], None),
            ([{"user_id": "ann", "delivered_seq": 5, "read_seq": 6, "read_version": 1}], "ann"),
        )
    ],
    "Settings": [
        {"t": "settings", "rid": "1", "conversation_id": ID, "muted": True, "muted_until": until, "archived": False}
        for until in (None, NOW)
    ],
    "TypingNotice": [{"t": "typing", "conversation_id": ID, "user_id": "ann", "for_ms": 5000}],
    "PresenceNotice": [
        {"t": "presence", "user_id": "ann", "online": True, "since": NOW},
        {"t": "presence", "user_id": "ann", "online": None, "since": None},
    ],
    "Error": [
        {"t": "error", "code": "not_found", "message": "m"},
        {"t": "error", "rid": "1", "code": "rate_limited", "message": "m", "field": "a.b", "retry_after_ms": 5},
    ],
    "Expiring": [{"t": "expiring", "in_s": 60}],
    "Reconnect": [{"t": "reconnect", "after_ms": 0, "reason": "r"}],
    "Pong": [{"t": "pong", "server_time": NOW}, {"t": "pong", "rid": "1", "server_time": NOW}],
}

_HEADERS = {
    "ce_specversion": "1.0",
    "ce_id": ID,
    "ce_subject": ID,
    "ce_time": NOW,
    "content-type": "application/json",
    "seq": "7",
}
_ACK = {"conversation_id": ID, "user_id": "ann", "device_id": "phone", "at": NOW}

RECORDS: dict[str, list[dict[str, Any]]] = {
    "ReceiptRecord": [
        {**_RECEIPT, "kind": "read", "cause": "read"},
        {**_RECEIPT, "kind": "unread", "cause": "refused:stale", "device_id": "phone"},
        {**_RECEIPT, "kind": "settings", "cause": "set"},
    ],
    "AckRecord": [
        {**_ACK, "kind": "delivered", "ranges": [[1, 5]]},
        {**_ACK, "kind": "read", "seq": 5, "version": 0},
    ],
    "EventHeaders": [
        {**_HEADERS, "ce_source": "/waybill/ingest", "ce_type": "waybill.event.message"},
        {**_HEADERS, "ce_source": "/waybill/ingest", "ce_type": "waybill.event.edit", "late": "1"},
    ],
    "ReceiptHeaders": [
        {
            **_HEADERS,
            "ce_source": "/waybill/receipts",
            "ce_type": f"waybill.receipt.{kind}",
            "user_id": "ann",
            "kind": kind,
        }
        for kind in ("read", "settings")
    ],
    "DeadHeaders": [
        {"dead_source": "waybill.acks.v1/3", "dead_offset": "0", "dead_error": "not JSON", "dead_attempts": "1"}
    ],
}
