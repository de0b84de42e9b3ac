"""What a client says without an answer to wait for, and what it hears of others besides events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .standing import MAX_PRESENCE
from .timeline import Conversations

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from ._frames import Conversation, Presence, Receipt, Typing, UnreadTotals
    from .engine import Engine
    from .session import Session


class Signals:
    """Acks, marks, typing, presence: a part of ``Client``."""

    _engine: Engine
    _session: Session

    def receipts(self) -> AsyncIterator[Receipt]:
        """Iterate over receipts as they grow; of several that wait for one member only the newest is left."""
        return self._engine.receipts

    def typings(self) -> AsyncIterator[Typing]:
        """Iterate over who is writing; one that has run out before it is taken is left out."""
        return self._engine.typings

    def presences(self) -> AsyncIterator[Presence]:
        """Iterate over the online states asked for with ``presence``; only the newest of a user waits."""
        return self._engine.presences

    async def ack(self, conversation_id: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell the server, with the next batch, that these inclusive ranges are stored; for ``auto_ack=False``."""
        self._engine.check_open()
        now = asyncio.get_running_loop().time()
        self._engine.dispatch(self._session.ack(conversation_id.lower(), ranges, now))

    async def read(self, conversation_id: str, seq: int) -> None:
        """Raise the user's read mark; a lower one than present changes nothing. Kept and told again after a loss."""
        self._mark(conversation_id, seq)
        self._engine.dispatch(self._session.read(conversation_id.lower(), seq))

    async def unread(self, conversation_id: str, seq: int) -> None:
        """Set the user's read mark to ``seq`` on purpose, lower than present too."""
        self._mark(conversation_id, seq)
        self._engine.dispatch(self._session.unread(conversation_id.lower(), seq))

    async def watch(self, conversation_id: str, *, on: bool = True) -> None:
        """Want other members' receipts of a group, as far as they are and as they grow, or with ``on`` False no more.

        Kept and said again on each connection of this client.
        """
        self._engine.check_open()
        self._engine.dispatch(self._session.watch(conversation_id.lower(), on=on))

    async def typing(self, conversation_id: str) -> None:
        """Tell the other members that the user is writing.

        To be called as the user types: what is sooner than 2 s after the last one is dropped, as is all without a
        connection.
        """
        self._engine.check_open()
        now = asyncio.get_running_loop().time()
        self._engine.dispatch(self._session.typing(conversation_id.lower(), now))

    async def presence(self, users: Iterable[str]) -> None:
        """Want the online state of at most 200 users, in place of those named before; see ``presences``.

        Kept and said again on each connection of this client.
        """
        self._engine.check_open()
        named = list(dict.fromkeys(users))
        if len(named) > MAX_PRESENCE:
            raise ValueError(f"at most {MAX_PRESENCE} users at once")
        self._engine.dispatch(self._session.presence(named))

    def conversation(self, conversation_id: str) -> Conversation | None:
        """Return what is known of a conversation, None if nothing is."""
        timeline = self._session.timelines.get(conversation_id.lower())
        return timeline.view() if timeline is not None and timeline.known else None

    @property
    def conversations(self) -> Mapping[str, Conversation]:
        """A live, read-only view of all conversations by id."""
        return Conversations(self._session.timelines)

    @property
    def unread_totals(self) -> UnreadTotals | None:
        """What was unread in all as of the last listing; None if that told only of what had changed, or none came yet.

        It is not counted on. ``GET /v1/unread`` of the server tells it at any time.
        """
        return self._session.totals

    def _mark(self, conversation_id: str, seq: int) -> None:
        self._engine.check_open()
        known = self.conversation(conversation_id)
        if known is None or not 0 <= seq <= known.head:
            raise ValueError(f"seq {seq} is not known in {conversation_id}")
