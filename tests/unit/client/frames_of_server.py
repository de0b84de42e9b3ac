"""Frames as a server writes them, for tests of the SDK."""

from __future__ import annotations

from typing import Any

CHAT = "11111111-1111-4111-8111-111111111111"
ME = "anna"


def event(
    seq: int, *, chat: str = CHAT, sender: str = "bob", event_id: str | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "t": "event",
        "conversation_id": chat,
        "seq": seq,
        "event_id": event_id or f"e{seq}",
        "type": "message",
        "sender_id": sender,
        "client_msg_id": f"m{seq}",
        "body": {"text": str(seq)},
        "created_at": "2026-01-01T00:00:00.000000Z",
        "a_later_field": 1,
        **more,
    }


def conversation(head: int, cursor: int, *, chat: str = CHAT, **more: Any) -> dict[str, Any]:
    return {
        "t": "conversation",
        "conversation_id": chat,
        "kind": "group",
        "title": "T",
        "role": "member",
        "head": head,
        "visible": [[1, None]],
        "cursor": cursor,
        "delivered_seq": 0,
        "read_seq": 0,
        "read_version": 0,
        "unread": 0,
        "updated_at": "2026-01-01T00:00:00.000000Z",
        "muted": False,
        "archived": False,
        **more,
    }


def page(rid: str, events: list[dict[str, Any]], *, after: int, head: int, complete: bool = True) -> dict[str, Any]:
    return {
        "t": "page",
        "rid": rid,
        "conversation_id": CHAT,
        "events": events,
        "next": events[-1]["seq"] if events else after,
        "head": head,
        "complete": complete,
    }


def welcome(**limits: Any) -> dict[str, Any]:
    return {
        "t": "welcome",
        "session_id": "s",
        "user_id": ME,
        "device_id": "d",
        "server_time": "2026-01-01T00:00:00.000000Z",
        "limits": {
            "frame_bytes": 98304,
            "window": 256,
            "resend_s": 5,
            "heartbeat_s": 25,
            "sends_per_s": None,
            **limits,
        },
    }


def before_page(rid: str, events: list[dict[str, Any]], *, before: int, limit: int) -> dict[str, Any]:
    """The page of ``events`` (a whole timeline) below ``before``."""
    found = [one for one in events if one["seq"] < before][-limit:]
    next_ = found[0]["seq"] if found else 1
    return page(rid, found, after=0, head=len(events), complete=next_ == 1) | {"next": next_}


def sent(frame: dict[str, Any], seq: int, *, duplicate: bool = False, event_id: str | None = None) -> dict[str, Any]:
    return {
        "t": "sent",
        "rid": frame["rid"],
        "conversation_id": frame["conversation_id"],
        "client_msg_id": frame["client_msg_id"],
        "event_id": event_id or f"e{seq}",
        "seq": seq,
        "created_at": "2026-01-01T00:00:00.000000Z",
        "duplicate": duplicate,
    }


def receipt(user: str, delivered: int, version: int, read: int) -> dict[str, Any]:
    return {
        "t": "receipt",
        "conversation_id": CHAT,
        "user_id": user,
        "delivered_seq": delivered,
        "read_seq": read,
        "read_version": version,
    }
