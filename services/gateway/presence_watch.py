"""Tells sessions of the presence of those with whom they share a conversation: what ties `Watchers` to the stores."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from services.gateway.link import AwayError
from services.gateway.metrics import PRESENCE_CHECKS, PRESENCE_FRAMES, PRESENCE_WATCHED, REDIS_BAD_MESSAGES
from services.gateway.presence_state import News
from services.gateway.presence_watchers import Watchers
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from services.gateway.link import Link
    from services.gateway.presence_state import Session

    Pair = tuple[str, str]
    Shares = Callable[[Sequence[Pair]], Awaitable[set[Pair]]]

_LOOP = LOOP_ERRORS.labels("presence_watch")
_PAIRS = 1_000
"""Most pairs of users in one read from Postgres, about."""

_USERS = 200
"""Most users in one call of Redis."""

_FRAMES = 500
"""Frames that are written before others get their turn."""

_GATHER_S = 0.02
_LEAST_OFTEN_S = 1.0

_NEWS = msgspec.json.Decoder(tuple[str, list[tuple[str, int, str]]])
_ANSWERS = msgspec.json.Decoder(tuple[str, list[tuple[int, str, float]]])


def keys_of(prefix: str, user_id: str) -> tuple[str, str]:
    """Where a user's sessions are kept, and its state."""
    return f"{prefix}:sessions:{user_id}", f"{prefix}:online:{user_id}"


def channel_of(prefix: str) -> str:
    """Where changes of presence are published."""
    return f"{prefix}:presence"


class Watching:
    """``shares`` says which pairs of users share a conversation; it raises `UnavailableError`.

    ``life_s``, ``grace_s``: as `Watchers` has them. ``settle_s``: how long a store that is back, or was emptied, is
    given until all gateways have told it everything. ``unknown_after_s``: how long Redis may be away before what was
    known is unknown. ``recheck_s``: how often it is checked who shares a conversation, if nobody says that it changed.
    """

    def __init__(
        self,
        link: Link,
        shares: Shares,
        *,
        prefix: str,
        life_s: float,
        grace_s: float,
        settle_s: float,
        unknown_after_s: float,
        recheck_s: float,
    ) -> None:
        self._link = link
        self._shares = shares
        self._prefix = prefix
        self._grace_us = round(grace_s * 1e6)
        self._settle_s = settle_s
        self._unknown_after_s = unknown_after_s
        self._recheck_s = recheck_s
        self._ask_script = link.script(__file__)
        self._watchers = Watchers(life_s=life_s, grace_s=grace_s)
        self._sessions: dict[str, Session] = {}
        self._to_check, self._to_ask, self._to_say = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._lost_at: float | None = None
        self._was_there = False
        link.subscribe(channel_of(prefix), self._heard)
        link.attach(renewed=self._renewed, lost=self._lost)

    def watch(self, session_id: str, session: Session, users: Iterable[str]) -> None:
        """The session wants to know of these users, instead of those that it named before."""
        self._sessions[session_id] = session
        self._watchers.want(session, users)
        self._to_check.set()

    def ended(self, session_id: str) -> None:
        """A session has ended."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._watchers.ended(session)

    def membership_changed(self, user_id: str) -> None:
        """The user joined or left a conversation."""
        self._watchers.membership_changed(user_id)
        self._to_check.set()

    async def run(self) -> None:
        """Check, ask and tell, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checking(), name="presence-check")
            tasks.create_task(self._asking(), name="presence-ask")
            tasks.create_task(self._saying(), name="presence-say")

    async def _checking(self) -> None:
        backoff = Backoff(0.1, 1.0)
        away = False
        while True:
            if await _within(self._to_check, self._recheck_s / 10):
                await asyncio.sleep(_GATHER_S)
            self._to_check.clear()
            self._watchers.check_old(time.monotonic() - self._recheck_s)
            while checks := self._watchers.unchecked(_PAIRS):
                PRESENCE_CHECKS.inc()
                asked = {(one.session.user_id, other) for one in checks for other in one.users}
                try:
                    found = await self._shares([pair for pair in asked if pair[0] != pair[1]])
                except UnavailableError as error:
                    _LOOP.inc()
                    if not away:
                        logger(__name__).warning("who may know of whom is not checked", error=str(error))
                    away = True
                    self._watchers.not_checked(checks)
                    self._to_say.set()
                    await asyncio.sleep(backoff.next())
                    continue
                away = False
                backoff.reset()
                now = time.monotonic()
                for check in checks:
                    me = check.session.user_id
                    self._watchers.checked(check, {one for one in check.users if one == me or (me, one) in found}, now)
                self._to_say.set()
                self._to_ask.set()

    async def _asking(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            await self._link.up()
            PRESENCE_WATCHED.set(len(self._watchers))
            users = self._watchers.due(time.monotonic(), _USERS)
            if not users:
                if await _within(self._to_ask, min(_LEAST_OFTEN_S, self._watchers.next_due_in(time.monotonic()))):
                    await asyncio.sleep(_GATHER_S)
                self._to_ask.clear()
                continue
            try:
                await self._ask(users)
                backoff.reset()
            except (AwayError, msgspec.MsgspecError):
                _LOOP.inc()
                self._watchers.not_answered(users, time.monotonic())
                await asyncio.sleep(backoff.next())

    async def _ask(self, users: Sequence[str]) -> None:
        keys = [self._link.epoch_key]
        for user_id in users:
            keys += keys_of(self._prefix, user_id)
        arguments: list[str | int] = [channel_of(self._prefix), self._grace_us, round(self._settle_s * 1e6), *users]
        at, answers = _ANSWERS.decode(await self._link.call(self._ask_script, keys, arguments) or b"")
        now = time.monotonic()
        for user_id, (state, since, again_s) in zip(users, answers, strict=False):
            self._watchers.answered(user_id, News(state, since, int(at)), again_s, now)
        self._to_say.set()

    async def _saying(self) -> None:
        while True:
            left = self._unknown_in(time.monotonic())
            await _within(self._to_say, left)
            self._to_say.clear()
            if self._unknown_in(time.monotonic()) == 0.0:
                self._lost_at = None
                self._watchers.lost()
            written = 0
            for session, frame in self._watchers.frames():
                session.write(frame)
                written += 1
                if written == _FRAMES:
                    PRESENCE_FRAMES.inc(written)
                    written = 0
                    await asyncio.sleep(0)
            PRESENCE_FRAMES.inc(written)

    def _unknown_in(self, now: float) -> float | None:
        """Seconds until what is known has to be forgotten; None while Redis is there, or it is done."""
        return None if self._lost_at is None else max(0.0, self._lost_at + self._unknown_after_s - now)

    def _heard(self, message: bytes) -> None:
        try:
            at, changes = _NEWS.decode(message)
            at_us = int(at)
        except (msgspec.MsgspecError, ValueError):
            REDIS_BAD_MESSAGES.inc()
            return
        now = time.monotonic()
        for user_id, state, since in changes:
            self._watchers.heard(user_id, News(state, since, at_us), now)
        self._to_say.set()
        self._to_ask.set()

    def _renewed(self) -> None:
        self._lost_at = None
        # What was there before this gateway needs no time.
        self._watchers.renewed(time.monotonic() + (self._settle_s if self._was_there else 0.0))
        self._was_there = True
        self._to_ask.set()

    def _lost(self) -> None:
        self._lost_at = time.monotonic()
        self._watchers.away()
        self._to_say.set()


async def _within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False if it took longer."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
