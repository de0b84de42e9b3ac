"""What a client asks of its session: each frame after `hello`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from services.gateway.acks import Device, Mark
from services.gateway.close import Close
from services.gateway.metrics import IGNORED_ACKS
from shared.clock import wire_time
from shared.contracts import frames
from shared.errors import (
    BadRequestError,
    InternalError,
    NotFoundError,
    UnauthenticatedError,
    WaybillError,
)
from shared.logging import logger
from shared.timeline import page

if TYPE_CHECKING:
    from services.gateway.answers import Outcome
    from services.gateway.connection import Connection
    from services.gateway.session import Feed


async def handle(connection: Connection, text: str | bytes) -> None:
    """Answer one frame. Raises `Close` where the protocol ends the session; every other fault is an `error` frame."""
    limit = connection.parts.settings.gateway_frame_bytes
    if len(text) > limit or (isinstance(text, str) and len(text) * 4 > limit and len(text.encode()) > limit):
        raise Close(1009, f"a frame has at most {limit} bytes")
    if isinstance(text, bytes):
        connection.refuse(BadRequestError("a binary frame", field="t"))
        return
    try:
        frame = frames.parse(text)
    except BadRequestError as error:
        rid = None if error.field == "rid" else frames.rid_of(text)
        connection.refuse(error, rid)
        return
    rid = getattr(frame, "rid", None)
    try:
        await _answer(connection, frame)
    except WaybillError as error:
        connection.refuse(error, rid)
    except Close:
        raise
    except Exception:  # noqa: BLE001 - a fault in one frame ends neither the session nor the service
        logger(__name__).exception("a frame was not handled", session_id=connection.session_id)
        connection.refuse(InternalError("a fault of the server"), rid)


async def _answer(connection: Connection, frame: frames.Known) -> None:
    match frame:
        case frames.Send():
            await connection.turn_to_send()
            _send(connection, frame)
        case frames.Ack():
            _ack(connection, frame)
        case frames.Read() | frames.Unread():
            _mark(connection, frame)
        case frames.Pull():
            await _pull(connection, frame)
        case frames.Create():
            created = await connection.parts.sends.create(connection.user_id, frame)
            connection.parts.fanout.committed(connection.user_id, created.conversation_id, 1)
            connection.say(
                {
                    "t": "created",
                    "rid": frame.rid,
                    "conversation_id": created.conversation_id,
                    "existing": created.existing,
                }
            )
        case frames.Token():
            await _token(connection, frame)
        case frames.Ping():
            now = wire_time(datetime.now(UTC))
            rid = {} if frame.rid is None else {"rid": frame.rid}
            connection.say({"t": "pong", **rid, "server_time": now})
        case frames.Hello():
            raise BadRequestError("hello was said already", field="t")


def _send(connection: Connection, frame: frames.Send) -> None:
    def answer(outcome: Outcome) -> None:
        connection.answered()
        if isinstance(outcome, WaybillError):
            connection.refuse(outcome, frame.rid)
            return
        conversation_id = frame.conversation_id.lower()
        connection.parts.fanout.committed(connection.user_id, conversation_id, outcome.seq)
        connection.say(
            {
                "t": "sent",
                "rid": frame.rid,
                "conversation_id": conversation_id,
                "client_msg_id": frame.client_msg_id,
                "event_id": outcome.event_id,
                "seq": outcome.seq,
                "created_at": outcome.created_at,
                "duplicate": outcome.duplicate,
            }
        )

    connection.parts.sends.submit(connection.user_id, frame, answer)
    connection.sending()


def _feed(connection: Connection, conversation_id: str) -> Feed | None:
    return connection.session.feeds.get(conversation_id.lower())


def _ack(connection: Connection, frame: frames.Ack) -> None:
    feed = _feed(connection, frame.conversation_id)
    if feed is None:
        IGNORED_ACKS.inc()
        return
    ranges = [(low, high) for low, high in frame.ranges]
    if feed.fresh and feed.wait_for_frame(ranges):
        return
    ignored = connection.ack(feed, ranges, connection.parts.fanout.rooms[feed.conversation_id].ackable)
    if ignored:
        IGNORED_ACKS.inc(ignored)


def _mark(connection: Connection, frame: frames.Read | frames.Unread) -> None:
    feed = _feed(connection, frame.conversation_id)
    if feed is None:
        raise NotFoundError("no such conversation", field="conversation_id")
    version = feed.read_version if frame.version is None else frame.version
    device = Device(feed.conversation_id, connection.user_id, connection.device_id)
    kind: Literal["read", "unread"] = "read" if isinstance(frame, frames.Read) else "unread"
    connection.parts.acks.mark(Mark(device, kind, frame.seq, version))


async def _pull(connection: Connection, frame: frames.Pull) -> None:
    found = await page(
        connection.parts.pool,
        frame.conversation_id.lower(),
        connection.user_id,
        after=frame.after,
        before=frame.before,
        limit=frame.limit,
    )
    connection.parts.fanout.committed(connection.user_id, found.conversation_id, found.head)
    connection.write(found.encode(t="page", rid=frame.rid))


async def _token(connection: Connection, frame: frames.Token) -> None:
    try:
        claims = await connection.parts.verifier.verify(frame.token)
    except UnauthenticatedError as error:
        raise Close(4401, error.message) from None
    same = (claims.subject, claims.scope) == (connection.user_id, "user")
    if not same or claims.device not in (None, connection.device_id):
        raise Close(4401, "the token is not of this user and device")
    connection.renew(claims)
