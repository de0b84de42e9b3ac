"""Who is typing where: told to the others of a conversation, here and on other gateways. Lossy by design."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from services.gateway.channel import Channel
from services.gateway.metrics import TYPING
from services.gateway.wire import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from services.gateway.link import Link

FOR_MS = 5000
_EVERY_S = 2.0
_GATHER_S = 0.05
_TOLD, _TOO_SOON, _TOO_LARGE = (TYPING.labels(result) for result in ("told", "too_soon", "too_large"))


class Listener(Protocol):
    """A session's connection."""

    @property
    def user_id(self) -> str:
        """Whose session it is."""

    @property
    def congested(self) -> bool:
        """Whether too much waits to be written."""

    def write(self, frames: bytes) -> None:
        """Write a ready frame."""


class Membership(Protocol):
    """A session's feed of a conversation."""

    @property
    def member(self) -> bool:
        """Whether the user is a member now."""

    @property
    def loading(self) -> bool:
        """Whether its `conversation` frame is not out yet."""


class Typed(msgspec.Struct, frozen=True, array_like=True):
    """A user is typing."""

    conversation_id: str
    user_id: str


_DECODER = msgspec.json.Decoder(tuple[str, list[Typed]])


class Typing:
    """``feeds_of``: who follows a conversation here, as (connection, feed); empty if nobody does.

    ``most``: in a conversation with more local sessions nobody is told.
    """

    def __init__(
        self,
        link: Link,
        feeds_of: Callable[[str], Collection[tuple[Listener, Membership]]],
        *,
        prefix: str,
        most: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feeds_of = feeds_of
        self._most = most
        self._clock = clock
        self._last: dict[tuple[str, str], float] = {}
        self._others = Channel(link, prefix, "typing", _DECODER, self._heard, gather_s=_GATHER_S)

    def typed(self, session_id: str, user_id: str, conversation_id: str) -> None:
        """A member says that it is typing. At most once in 2 s per session and conversation, the rest is dropped."""
        now = self._clock()
        self._forget(now - _EVERY_S)
        key = (session_id, conversation_id)
        if key in self._last:
            _TOO_SOON.inc()
            return
        self._last[key] = now
        if not self._tell(conversation_id, user_id):
            _TOO_LARGE.inc()
            return
        _TOLD.inc()
        self._others.tell(Typed(conversation_id, user_id))

    async def run(self) -> None:
        """Publish until cancelled."""
        await self._others.run()

    def _forget(self, before: float) -> None:
        while self._last:
            oldest = next(iter(self._last))
            if self._last[oldest] > before:
                return
            del self._last[oldest]

    def _heard(self, typed: Typed) -> None:
        self._tell(typed.conversation_id, typed.user_id)

    def _tell(self, conversation_id: str, user_id: str) -> bool:
        feeds = self._feeds_of(conversation_id)
        if len(feeds) > self._most:
            return False
        frame: bytes | None = None
        for listener, feed in feeds:
            if listener.user_id == user_id or feed.loading or not feed.member or listener.congested:
                continue
            if frame is None:
                frame = _frame(conversation_id, user_id)
            listener.write(frame)
        return True


def _frame(conversation_id: str, user_id: str) -> bytes:
    return ready(
        msgspec.json.encode({"t": "typing", "conversation_id": conversation_id, "user_id": user_id, "for_ms": FOR_MS})
    )
