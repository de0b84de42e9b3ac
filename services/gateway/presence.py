"""Who is connected where, in Redis. It may vanish at any time: nothing on the message path asks for it.

Each gateway tells of its own users' sessions (`presence.lua` decides what that changes), again every ``refresh_s``
seconds, and of all at once when Redis is back or was emptied. Who wants to know is in `presence_watch.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from services.gateway.link import AwayError
from services.gateway.presence_watch import Watching, channel_of, keys_of
from shared.clock import Backoff
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.gateway.link import Link
    from services.gateway.presence_watch import Pair, Shares
    from shared.postgres import Pool

_SQL = statements(__file__)
_SHARES_CONVERSATION = _SQL["shares_conversation"]
_LOOP = LOOP_ERRORS.labels("presence")
_USERS = 200
"""Most users in one call of Redis."""

_GATHER_S = 0.02
_MOST_GONE = 10_000
"""Users whose ended sessions are remembered while Redis is away; those of others end there by their time."""

_READ_S = 5.0
_ANSWERS = msgspec.json.Decoder(list[str])


class Watcher(Protocol):
    """A session's connection."""

    @property
    def session_id(self) -> str:
        """Its id."""

    @property
    def user_id(self) -> str:
        """Whose session it is."""

    def write(self, frames: bytes) -> None:
        """Write a ready frame."""


class Sharing:
    """Which users share a conversation, as Postgres knows it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def __call__(self, pairs: Sequence[Pair]) -> set[Pair]:
        """Those pairs who are both members of some conversation now. Raises `UnavailableError`."""
        users: dict[str, list[str]] = {}
        for asker, other in pairs:
            users.setdefault(asker, []).append(other)
        last = list(itertools.accumulate(map(len, users.values())))
        first = [1, *(place + 1 for place in last[:-1])]
        with unavailable_if_away():
            async with asyncio.timeout(_READ_S):
                rows = await self._pool.fetch(
                    _SHARES_CONVERSATION, list(users), first, last, list(itertools.chain.from_iterable(users.values()))
                )
        return {(row["asker"], row["user_id"]) for row in rows}


class _Here:
    """A user's sessions on this gateway. ``since``: since when it is online, as Redis said; ``told``: when we did."""

    __slots__ = ("sessions", "since", "told")

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.since = ""
        self.told = float("-inf")


class Presence:
    """Keeps `PREFIX:sessions:USER`: a sorted set of `GATEWAY/SESSION`, scored by its end in s since the epoch.

    ``refresh_s``: how often each session is told; it ends in Redis twice that later. ``grace_s``: how long a user
    counts as online after its last session was closed, so that a reconnect is no news. ``keep_s``: how long it is known
    since when a user is offline. The rest is `Watching`'s.
    """

    def __init__(
        self,
        link: Link,
        shares: Shares,
        *,
        prefix: str,
        gateway: str,
        refresh_s: float,
        grace_s: float = 10.0,
        keep_s: float = 7 * 86_400.0,
        settle_s: float = 1.5,
        unknown_after_s: float = 3.0,
        recheck_s: float = 600.0,
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._gateway = gateway
        self._refresh_s = refresh_s
        self._life_s = 2 * refresh_s
        self._arguments = (channel_of(prefix), self._life_s, round(grace_s * 1e6), max(1, round(keep_s)))
        self._tell_script = link.script(__file__)
        self._sessions: dict[str, str] = {}
        self._users: dict[str, _Here] = {}
        self._changed: dict[str, None] = {}
        self._gone: dict[str, set[str]] = {}
        self._telling = False
        self._some = asyncio.Event()
        self._told = asyncio.Event()
        link.attach(renewed=self._renewed)
        self._watching = Watching(
            link,
            shares,
            prefix=prefix,
            life_s=self._life_s,
            grace_s=grace_s,
            settle_s=settle_s,
            unknown_after_s=unknown_after_s,
            recheck_s=recheck_s,
        )

    def opened(self, session_id: str, user_id: str) -> None:
        """A session is here."""
        self._sessions[session_id] = user_id
        here = self._users.get(user_id)
        if here is None:
            here = self._users[user_id] = _Here()
        here.sessions.add(session_id)
        self._changed[user_id] = None
        self._some.set()

    def closed(self, session_id: str) -> None:
        """A session has ended."""
        self._watching.ended(session_id)
        user_id = self._sessions.pop(session_id, None)
        if user_id is None:
            return
        here = self._users[user_id]
        here.sessions.discard(session_id)
        if not here.sessions:
            del self._users[user_id]
        self._ended(user_id, {session_id})

    def watch(self, watcher: Watcher, users: Iterable[str]) -> None:
        """The session wants to know of these users, and no longer of those that it named before.

        It gets a `presence` frame for each now, and one for each change until it ends.
        """
        self._watching.watch(watcher.session_id, watcher, users)

    def membership_changed(self, user_id: str) -> None:
        """The user joined or left a conversation: who may know of whom is checked again."""
        self._watching.membership_changed(user_id)

    async def run(self) -> None:
        """Tell and watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watching.run(), name="presence-watch")
            tasks.create_task(self._tell(), name="presence-tell")

    async def drained(self, timeout_s: float) -> bool:
        """Wait until Redis knows what there is to tell; False if it takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._changed or self._telling:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return False
        return True

    async def _tell(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            await self._link.up()
            users = self._due(time.monotonic())
            if not users:
                self._told.set()
                await self._wait()
                continue
            gone = {user_id: self._gone.pop(user_id) for user_id in users if user_id in self._gone}
            self._telling = True
            try:
                await self._tell_of(users, gone)
                backoff.reset()
            except (AwayError, msgspec.MsgspecError):
                _LOOP.inc()
                for user_id in users:
                    self._changed[user_id] = None
                for user_id, sessions in gone.items():
                    self._ended(user_id, sessions)
                await asyncio.sleep(backoff.next())
            finally:
                self._telling = False

    def _due(self, now: float) -> list[str]:
        """Whom to tell of now: who changed, else who was not told of for long. The longest not told come first."""
        changed = set(itertools.islice(self._changed, _USERS))
        for user_id in changed:
            del self._changed[user_id]
        users = list(changed)
        for user_id, here in self._users.items():
            if here.told > now - self._refresh_s or len(users) >= _USERS:
                break
            if user_id not in changed:
                users.append(user_id)
        return users

    async def _wait(self) -> None:
        oldest = next(iter(self._users.values()), None)
        due_in = self._refresh_s if oldest is None else oldest.told + self._refresh_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, due_in)):
                await self._some.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass
        self._some.clear()

    async def _tell_of(self, users: Sequence[str], gone: dict[str, set[str]]) -> None:
        keys: list[str] = []
        arguments: list[str | int | float] = [*self._arguments]
        for user_id in users:
            keys += keys_of(self._prefix, user_id)
            here = self._users.get(user_id)
            arguments += (user_id, "" if here is None else here.since)
            for sessions in (() if here is None else here.sessions, gone.get(user_id, ())):
                arguments.append(len(sessions))
                arguments += [f"{self._gateway}/{session_id}" for session_id in sessions]
        answers = _ANSWERS.decode(await self._link.call(self._tell_script, keys, arguments) or b"")
        now = time.monotonic()
        for user_id, since in zip(users, answers, strict=False):
            here = self._users.pop(user_id, None)
            if here is not None:
                here.since, here.told = since, now
                self._users[user_id] = here

    def _ended(self, user_id: str, sessions: set[str]) -> None:
        if user_id in self._gone or len(self._gone) < _MOST_GONE:
            self._gone[user_id] = self._gone.get(user_id, set()) | sessions
            self._changed[user_id] = None
            self._some.set()

    def _renewed(self) -> None:
        self._changed = dict.fromkeys((*self._users, *self._gone))
        self._some.set()
