"""What a session is told first: `welcome`, its conversations, `listed`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from services.gateway.listing import newest_first
from services.gateway.loading import Begin, loaded
from services.gateway.wire import ready
from shared.clock import wire_time

if TYPE_CHECKING:
    from services.gateway.connection import Connection
    from services.gateway.listing import Listed
    from services.gateway.since import Since

_CHUNK = 500
"""Frames of one write while a session is listed."""


class Found(NamedTuple):
    """What was read for a session. ``since``: the snapshot that its conversations were found in.

    ``whole``: all of the user's conversations were read.
    """

    begin: Begin
    listed: list[Listed]
    since: Since
    whole: bool


async def tell(connection: Connection, found: Found) -> None:
    """Say `welcome`, every conversation, and `listed`. Raises `Close` if the client takes nothing."""
    found.listed.sort(key=newest_first, reverse=True)
    out = [ready(_welcome(connection))]
    count = 0
    for listed in found.listed:
        feed = None if connection.ended else connection.session.feeds.get(listed.conversation_id)
        if feed is None:
            continue
        frames_ = loaded(connection, feed, listed, found.begin)
        count += bool(frames_)
        out += frames_
        if len(out) >= _CHUNK:
            connection.write(b"".join(out))
            out = []
            await asyncio.sleep(0)
            await connection.drained()
    if not connection.ended:
        out.append(ready(f'{{"t":"listed","count":{count},"since":"{found.since}"{_totals(found)}}}'.encode()))
        connection.write(b"".join(out))
        connection.wake()  # what is missing leaves with it, in one write


def _totals(found: Found) -> str:
    """What is unread in all, where all was read anyway."""
    if not found.whole:
        return ""
    unread = muted = 0
    for one in found.listed:
        if one.muted:
            muted += one.unread
        else:
            unread += one.unread
    return f',"unread":{unread},"muted_unread":{muted}'


def _welcome(connection: Connection) -> bytes:
    settings = connection.parts.settings
    sends = settings.gateway_sends_per_s
    return (
        f'{{"t":"welcome","session_id":"{connection.session_id}","user_id":"{connection.user_id}",'
        f'"device_id":"{connection.device_id}","server_time":"{wire_time(datetime.now(UTC))}",'
        f'"limits":{{"frame_bytes":{settings.gateway_frame_bytes},"window":{settings.gateway_window},'
        f'"resend_s":{settings.gateway_resend_s:g},"heartbeat_s":{settings.gateway_heartbeat_s:g},'
        f'"sends_per_s":{f"{sends:g}" if sends else "null"}}}}}'
    ).encode()
