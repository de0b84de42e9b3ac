"""What is known of one user's presence, and what one session wants to know. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from services.gateway.wire import ready
from shared.clock import wire_time

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

ONLINE, OFFLINE, LEAVING, UNKNOWN = 1, 0, 2, -1
"""What is said of a user. Leaving: its last session is closed, and it has some seconds to come back."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP_US = 60_000_000
"""News that are older than the last ones by more than this are no late ones: the store's clock was set back."""


class Session(Protocol):
    """A session's connection."""

    @property
    def user_id(self) -> str:
        """Whose session it is."""

    def write(self, frames: bytes) -> None:
        """Write a ready frame."""


class News(NamedTuple):
    """``since``: since when it is so, in µs, or empty. ``at``: when it was said, by the store's clock."""

    state: int
    since: str
    at: int


class Want:
    """A session's list. ``answered``: it has heard something of each, though maybe only that it is unknown.

    ``unchecked``: of whom it is not known yet, or not any more, whether the session may know.
    """

    __slots__ = ("answered", "unchecked", "users")

    def __init__(self, users: frozenset[str]) -> None:
        self.users = users
        self.unchecked: AbstractSet[str] = users
        self.answered = False


class Check(NamedTuple):
    """Of which of ``users`` may the session know? ``want``: the list that they are of."""

    session: Session
    users: AbstractSet[str]
    want: Want


class Watched:
    """A user that sessions want to know of.

    ``at``: the store's time in µs of what is known. ``asked``: the store has said what it knows. ``due``: when to ask.
    ``sessions`` hear of it; those in ``waiting`` have not yet; ``strangers`` want to, and may not.
    """

    __slots__ = ("asked", "at", "due", "online", "sessions", "since", "strangers", "waiting")

    def __init__(self) -> None:
        self.online: bool | None = None
        self.since = ""
        self.at = 0
        self.asked = False
        self.due = 0.0
        self.sessions: set[Session] = set()
        self.waiting: set[Session] = set()
        self.strangers: set[Session] = set()

    def learn(self, news: News) -> bool:
        """Take what is said of the user; whether it changes anything. What comes late does not."""
        if self.at - _STEP_US < news.at < self.at:
            return False
        self.at = news.at
        online = news.state == ONLINE
        if (self.online, self.since) == (online, news.since):
            return False
        self.online, self.since, self.asked = online, news.since, True
        self.waiting.clear()
        return True

    def forget(self) -> None:
        """Nothing is known any more, and nobody waits for it."""
        self.online, self.since, self.asked = None, "", False
        self.waiting.clear()

    def drop(self, session: Session) -> None:
        """The session does not want to know any more."""
        self.sessions.discard(session)
        self.waiting.discard(session)
        self.strangers.discard(session)


def frame(user_id: str, watched: Watched | None) -> bytes:
    """The `presence` frame; None: for who may not know."""
    online = None if watched is None else watched.online
    since = None
    if watched is not None and online is not None and watched.since:
        since = wire_time(_EPOCH + timedelta(microseconds=int(watched.since)))
    return ready(msgspec.json.encode({"t": "presence", "user_id": user_id, "online": online, "since": since}))
