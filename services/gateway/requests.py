"""What a client asks of its session: each frame after `hello`.

What needs no wait is answered at once. What does runs as `Connection.do`: the client's next frames come after it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from services.gateway import group_receipts, noting
from services.gateway.acks import Device, Mark
from services.gateway.asking import a_turn
from services.gateway.close import Close
from services.gateway.feed import Feed, Proposed
from services.gateway.limits import KINDS
from services.gateway.listing import list_conversations
from services.gateway.loading import LATER
from services.gateway.metrics import CLIENT_FRAMES, IGNORED_ACKS, RATE_LIMITED
from services.gateway.revocations import is_revoked, revocations_of
from services.gateway.wire import ready
from shared.clock import wire_time
from shared.contracts import frames
from shared.errors import (
    BadRequestError,
    InternalError,
    NotFoundError,
    NotMemberError,
    RateLimitedError,
    UnauthenticatedError,
    WaybillError,
)
from shared.logging import logger
from shared.timeline import page

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from services.gateway.answers import Outcome
    from services.gateway.connection import Connection


_RANGES_OF_A_FRAME = 100
"""An ack of more ranges counts as several frames: it costs as much."""

_COUNTS = {kind: CLIENT_FRAMES.labels(kind) for kind in KINDS}


def handle(connection: Connection, data: str | bytes) -> None:
    """Answer one frame. Raises `Close` where the protocol ends the session; every other fault is an `error` frame."""
    rid: str | None = None
    frame: frames.Known | None = None
    try:
        try:
            frame = _parse(data)
        except BadRequestError as error:
            _admit(connection, "frames")  # First: the second look at the text costs more than the first.
            rid = frames.explain(data, error) if isinstance(data, str) else None
            raise
        rid = getattr(frame, "rid", None)
        _answer(connection, frame, rid)
    except WaybillError as error:
        noting.refused(connection, frame, error)
        connection.refuse(error, rid)
    except Close:
        raise
    except Exception:  # noqa: BLE001 - a fault in one frame ends neither the session nor the service
        _fault(connection, rid)


def _fault(connection: Connection, rid: str | None) -> None:
    """Answer a frame at which something of ours failed, in the handler of that."""
    logger(__name__).exception("a frame was not handled", session_id=connection.session_id)
    connection.refuse(InternalError("a fault of the server"), rid)


def _parse(data: str | bytes) -> frames.Known:
    if isinstance(data, bytes):
        raise BadRequestError("a binary frame", field="t")
    return frames.parse(data)


def _answer(connection: Connection, frame: frames.Known, rid: str | None) -> None:
    match frame:
        case frames.Ack():
            for _ in range(0, len(frame.ranges), _RANGES_OF_A_FRAME):
                _admit(connection, "frames")
            _ack(connection, frame)
        case frames.Send():
            _admit(connection, "sends")
            _send(connection, frame)
        case frames.Read() | frames.Unread():
            _mark(connection, frame)
        case frames.Watch():
            _admit(connection, "pulls" if frame.on else "frames")
            _watch(connection, frame)
        case frames.Typing():
            _admit(connection, "frames")
            _typing(connection, frame)
        case frames.Presence():
            _admit(connection, "presence")
            connection.parts.social.watch(connection, frame.users)
        case frames.Ping():
            _admit(connection, "frames")
            now = wire_time(datetime.now(UTC))
            connection.say({"t": "pong", **({} if frame.rid is None else {"rid": frame.rid}), "server_time": now})
        case frames.Hello():
            raise BadRequestError("hello was said already", field="t")
        case _:
            _later(connection, rid, _work(connection, frame), frame)


def _work(
    connection: Connection, frame: frames.Pull | frames.Receipts | frames.Create | frames.Settings | frames.Token
) -> Coroutine[None, None, None]:
    """What has to wait for Postgres or ingest, once it is admitted."""
    match frame:
        case frames.Pull():
            _admit(connection, "pulls")
            return _pull(connection, frame)
        case frames.Receipts():
            _admit(connection, "pulls")
            return group_receipts.answer(connection, frame)
        case frames.Create():
            _admit(connection, "creates")
            return _create(connection, frame)
        case frames.Settings():
            _admit(connection, "sends")
            return _settings(connection, frame)
        case frames.Token():
            _admit(connection, "frames")
            return _token(connection, frame)


def _admit(connection: Connection, kind: str) -> None:
    """Count a frame against the session's and the user's rates. Raises `RateLimitedError`; far over them, `Close`."""
    _COUNTS[kind].inc()
    if connection.rates is None:
        return
    verdict = connection.rates.ask(kind, time.monotonic())
    if verdict.retry_after_ms:
        RATE_LIMITED.labels(kind, verdict.scope).inc()
    if verdict.far_over:
        raise Close(4429, "far over the rate")
    if verdict.retry_after_ms:
        raise RateLimitedError(f"too many {kind}", retry_after_ms=verdict.retry_after_ms)


def _later(
    connection: Connection,
    rid: str | None,
    work: Coroutine[None, None, None],
    frame: frames.Known | None = None,
) -> None:
    connection.do(_answered(connection, rid, work, frame))


async def _answered(
    connection: Connection, rid: str | None, work: Coroutine[None, None, None], frame: frames.Known | None
) -> None:
    try:
        # Who does not read what it asked for gets no more of it: pages are large.
        await connection.drained()
        await work
    except WaybillError as error:
        noting.unanswered(connection, frame, error)
        connection.refuse(error, rid)
    except Close:
        raise
    except Exception:  # noqa: BLE001 - a fault in one frame ends neither the session nor the service
        _fault(connection, rid)
    finally:
        work.close()  # it may not have begun


def _send(connection: Connection, frame: frames.Send) -> None:
    # A body is a view of its frame, whatever else that holds: what waits here is what is counted.
    frame = msgspec.structs.replace(frame, body=frame.body.copy())
    size = frame.body_bytes

    def answer(outcome: Outcome) -> None:
        connection.answered(size)
        if isinstance(outcome, WaybillError):
            noting.unanswered(connection, frame, outcome)
        if connection.ended:
            return
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

    connection.parts.sends.submit(connection.user_id, connection.device_id, frame, answer)
    connection.sending(size)


def _feed(connection: Connection, conversation_id: str) -> Feed | None:
    return connection.session.feeds.get(conversation_id) or connection.session.feeds.get(conversation_id.lower())


def _ack(connection: Connection, frame: frames.Ack) -> None:
    feed = _feed(connection, frame.conversation_id)
    if feed is None:
        IGNORED_ACKS.inc()
        noting.acked_in_vain(connection, frame.conversation_id.lower(), frame.ranges, None)
        return
    ranges = [(low, high) for low, high in frame.ranges]
    if feed.fresh and feed.wait_for_frame(ranges):
        feed.wake()
        return
    connection.ack(feed, ranges, feed.room.ackable)


def _mark(connection: Connection, frame: frames.Read | frames.Unread) -> None:
    feed = _feed(connection, frame.conversation_id)
    reads = feed is not None and feed.fresh and frame.version is None
    _admit(connection, "pulls" if reads else "frames")
    if feed is None:
        raise NotFoundError("no such conversation", field="conversation_id")
    if reads:
        _later(connection, None, _mark_of_earlier(connection, feed, frame), frame)
    else:
        _propose(connection, feed, frame)


async def _mark_of_earlier(connection: Connection, feed: Feed, frame: frames.Read | frames.Unread) -> None:
    """The version last told was told in an earlier session: this one has not read the conversation yet."""
    async with a_turn(connection.parts.asking):
        listing = await list_conversations(connection.parts.pool, [LATER.wanted(connection, feed.conversation_id)])
    if listing.rows[0] is not None:
        feed.read_version = max(feed.read_version, listing.rows[0].mine.read_version)
    if not connection.ended:
        _propose(connection, feed, frame)


def _propose(connection: Connection, feed: Feed, frame: frames.Read | frames.Unread) -> None:
    version = feed.read_version if frame.version is None else frame.version
    device = Device(feed.conversation_id, connection.user_id, connection.device_id)
    kind: Literal["read", "unread"] = "read" if isinstance(frame, frames.Read) else "unread"
    connection.parts.acks.mark(Mark(device, kind, frame.seq, version))
    feed.propose(Proposed(version, frame.seq, kind, time.monotonic()))


async def _create(connection: Connection, frame: frames.Create) -> None:
    created = await connection.parts.sends.create(connection.user_id, frame)
    if connection.ended:
        return
    connection.parts.fanout.committed(connection.user_id, created.conversation_id, 1)
    connection.say(
        {
            "t": "created",
            "rid": frame.rid,
            "conversation_id": created.conversation_id,
            "existing": created.existing,
        }
    )


async def _settings(connection: Connection, frame: frames.Settings) -> None:
    own = await connection.parts.sends.set_settings(connection.user_id, connection.device_id, frame)
    if not connection.ended:
        connection.say({"t": "settings", "rid": frame.rid, **msgspec.structs.asdict(own)})


async def _pull(connection: Connection, frame: frames.Pull) -> None:
    async with a_turn(connection.parts.asking):
        found = await page(
            connection.parts.pool,
            frame.conversation_id.lower(),
            connection.user_id,
            after=frame.after,
            before=frame.before,
            limit=frame.limit,
        )
    if not connection.ended:
        connection.parts.fanout.committed(connection.user_id, found.conversation_id, found.head)
        connection.write(ready(found.encode(t="page", rid=frame.rid)))


def _watch(connection: Connection, frame: frames.Watch) -> None:
    feed = _feed(connection, frame.conversation_id)
    if feed is None:
        raise NotFoundError("no such conversation", field="conversation_id")
    if frame.on and not (feed.member or feed.fresh):
        raise NotMemberError("no longer a member", field="conversation_id")
    watching = connection.parts.fanout.watching
    if frame.on:
        watching.watch(feed)
        _later(connection, None, group_receipts.tell_so_far(connection, feed))
    else:
        watching.unwatch(feed)


def _typing(connection: Connection, frame: frames.Typing) -> None:
    feed = _feed(connection, frame.conversation_id)
    if feed is None:
        raise NotFoundError("no such conversation", field="conversation_id")
    if feed.fresh:
        feed.wake()  # whether the user is a member is known by its `conversation` frame; until then nobody is told
        return
    if not feed.member:
        raise NotMemberError("no longer a member", field="conversation_id")
    connection.parts.social.typed(connection, feed.conversation_id)


async def _token(connection: Connection, frame: frames.Token) -> None:
    try:
        claims = await connection.parts.verifier.verify(frame.token)
    except UnauthenticatedError as error:
        raise Close(4401, error.message) from None
    same = (claims.subject, claims.scope) == (connection.user_id, "user")
    if not same or claims.device not in (None, connection.device_id):
        raise Close(4401, "the token is not of this user and device")
    # What this gateway was told of may be less: a revocation of before it started, or of a user who was not here.
    async with a_turn(connection.parts.asking):
        revocations = await revocations_of(connection.parts.pool, connection.user_id)
    if is_revoked(claims, connection.device_id, revocations):
        noting.revoked(connection)
        raise Close(4401, "the token was revoked")
    connection.renew(claims)
