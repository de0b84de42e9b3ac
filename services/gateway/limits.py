"""How much a client may ask for. Pure: time is given, in s of a monotonic clock.

A rate is a token bucket, kept as one number: the time at which it will be full again. Each session has its own buckets,
and the sessions of a user share others. What a user does on other gateways is known by what `spread.py` is told.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KINDS = ("frames", "sends", "pulls", "presence", "creates")
"""What is counted. Every frame counts as one of `frames`, and as one of its own kind."""

_PLACES = {kind: place for place, kind in enumerate(KINDS)}
_FRAMES = _PLACES["frames"]
_FULL = float("-inf")
_EXACT_S = 1e-6
"""Who waited as long as told must not be refused for what adding up times has rounded."""


class Rate(NamedTuple):
    """``per_s`` in the long run, and ``burst`` that may be saved up. 0 per second: no limit."""

    per_s: float = 0.0
    burst: float = 1.0

    @property
    def limits(self) -> bool:
        """Whether it limits anything."""
        return self.per_s > 0

    def after(self, full_at: float, now: float) -> float:
        """When a bucket that is full at ``full_at`` will be full if one more is taken now."""
        return max(full_at, now) + 1 / self.per_s

    def wait(self, full_at: float, now: float) -> float:
        """Seconds until one may be taken from a bucket that is full at ``full_at``; 0: now."""
        wait_s = self.after(full_at, now) - now - max(1.0, self.burst) / self.per_s
        return wait_s if wait_s > _EXACT_S else 0.0


NO_RATE = Rate()


class Patience(NamedTuple):
    """How much a client may ask for in vain: ``refusals`` in ``window_s``, then it is far over. 0: whatever it likes.

    What comes within ``heed_s`` of the first refusal may have been sent before that was read. It weighs a hundredth.
    """

    refusals: int = 200
    window_s: float = 10.0
    heed_s: float = 1.0


_PATIENCE = Patience()


class Verdict(NamedTuple):
    """``retry_after_ms``: 0 if it may be done now. ``scope``: whose rate is used up: session, user or shared."""

    retry_after_ms: int = 0
    far_over: bool = False
    scope: str = ""


GRANTED = Verdict()


class _User:
    """What the sessions of a user share. ``until``: told from elsewhere; ``used``: not yet told elsewhere."""

    __slots__ = ("full_at", "sessions", "until", "used")

    def __init__(self) -> None:
        self.sessions = 0
        self.full_at = [_FULL] * len(KINDS)
        self.until: list[float] | None = None
        self.used: list[int] | None = None

    def idle(self, now: float) -> bool:
        """Whether it may be forgotten: it is as a new one would be."""
        return max(self.full_at) <= now and self.used is None and (self.until is None or max(self.until) <= now)


class Rates:
    """A session's rates. Made by `Limits`."""

    __slots__ = ("_asked_in_vain", "_full_at", "_last_refused", "_limits", "_user", "_warned_at", "user_id")

    def __init__(self, limits: Limits, user_id: str, user: _User) -> None:
        self.user_id = user_id
        self._limits = limits
        self._user = user
        self._full_at = [_FULL] * len(KINDS)
        self._warned_at = _FULL
        self._last_refused = _FULL
        self._asked_in_vain = 0.0

    def ask(self, kind: str, now: float) -> Verdict:
        """May the session do one of this kind? If so, it is taken; if not, nothing is. ``kind``: one of `KINDS`."""
        place = _PLACES[kind]
        refused = self._refused(place, now)
        if refused is None and place != _FRAMES:
            refused = self._refused(_FRAMES, now)
        if refused is not None:
            wait_s, scope = refused
            retry_after_ms = max(1, math.ceil(wait_s * 1000))
            return Verdict(retry_after_ms, self._far_over(now), scope)
        self._take(place, now)
        if place != _FRAMES:
            self._take(_FRAMES, now)
        return GRANTED

    def _refused(self, place: int, now: float) -> tuple[float, str] | None:
        user = self._user
        if user.until is not None and user.until[place] > now:
            return user.until[place] - now, "shared"
        rate = self._limits.per_session[place]
        if rate.per_s > 0:
            wait_s = rate.wait(self._full_at[place], now)
            if wait_s > 0:
                return wait_s, "session"
        rate = self._limits.per_user[place]
        if rate.per_s > 0:
            wait_s = rate.wait(user.full_at[place], now)
            if wait_s > 0:
                return wait_s, "user"
        return None

    def _take(self, place: int, now: float) -> None:
        rate = self._limits.per_session[place]
        if rate.per_s > 0:
            self._full_at[place] = rate.after(self._full_at[place], now)
        rate = self._limits.per_user[place]
        if rate.per_s > 0:
            user = self._user
            user.full_at[place] = rate.after(user.full_at[place], now)
            if place not in self._limits.shared:
                return
            if user.used is None:
                user.used = [0] * len(KINDS)
                self._limits.active[self.user_id] = user
            user.used[place] += 1

    def _far_over(self, now: float) -> bool:
        patience = self._limits.patience
        if patience.refusals <= 0:
            return False
        per_s = patience.refusals / patience.window_s
        rested = now - self._last_refused
        if rested > patience.window_s:
            self._warned_at = now
        self._asked_in_vain = max(0.0, self._asked_in_vain - rested * per_s)
        self._asked_in_vain += 1.0 if now - self._warned_at >= patience.heed_s else 0.01
        self._last_refused = now
        return self._asked_in_vain > patience.refusals


class Usage(NamedTuple):
    """How many of each of `KINDS` a user did."""

    user_id: str
    counts: list[int]


class Limits:
    """The rates of all sessions of this process, by kind. What is not named has no limit.

    ``per_session``: of one session. ``per_user``: of all sessions of a user; those of ``shared`` kinds over all
    gateways, if `spread.py` runs. A user without a session is kept until its buckets are full: who comes back finds
    them as they were.
    """

    def __init__(
        self,
        per_session: Mapping[str, Rate],
        per_user: Mapping[str, Rate],
        *,
        shared: Iterable[str] = ("sends", "pulls", "presence", "creates"),
        patience: Patience = _PATIENCE,
    ) -> None:
        self.per_session = [per_session.get(kind, NO_RATE) for kind in KINDS]
        self.per_user = [per_user.get(kind, NO_RATE) for kind in KINDS]
        self.shared = frozenset(_PLACES[kind] for kind in shared)
        self.patience = patience
        self.active: dict[str, _User] = {}
        """Users that did something of a shared kind since `usage` was asked."""
        self._users: dict[str, _User] = {}
        self._left: dict[str, None] = {}

    def session(self, user_id: str) -> Rates:
        """The rates of a session that begins."""
        user = self._users.get(user_id)
        if user is None:
            user = self._users[user_id] = _User()
        user.sessions += 1
        self._left.pop(user_id, None)
        return Rates(self, user_id, user)

    def closed(self, rates: Rates) -> None:
        """A session has ended."""
        user = self._users[rates.user_id]
        user.sessions -= 1
        if not user.sessions:
            self._left[rates.user_id] = None

    def tidy(self, now: float, most: int = 1_000) -> None:
        """Forget users without a session whose buckets are full again; looks at ``most`` at a time."""
        for user_id in list(itertools.islice(self._left, most)):
            del self._left[user_id]
            if self._users[user_id].idle(now):
                del self._users[user_id]
            else:
                self._left[user_id] = None

    def usage(self, most: int) -> list[Usage]:
        """What about ``most`` users did, of those that did something since it was asked last."""
        out: list[Usage] = []
        while self.active and len(out) < most:
            user_id, user = next(iter(self.active.items()))
            del self.active[user_id]
            out.append(Usage(user_id, user.used or [0] * len(KINDS)))
            user.used = None
        return out

    def limit(self, user_id: str, kind: int, until: float) -> None:
        """Elsewhere it was found that the user is over its rate of `KINDS[kind]`."""
        user = self._users.get(user_id)
        if user is not None:
            if user.until is None:
                user.until = [_FULL] * len(KINDS)
            user.until[kind] = until
