"""Which session wants to know whose presence, and whom to ask when. Pure: time is given, in s of a monotonic clock.

A session wants a list of users. It hears of those with whom it shares a conversation; of everybody else it hears the
same as of somebody of whom nothing is known: unknown.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from services.gateway.presence_state import LEAVING, UNKNOWN, Check, Want, Watched, frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from services.gateway.presence_state import News, Session

_LATER_S = 0.1
"""Who leaves is asked for so long after its time is over."""


class Watchers:
    """``life_s``: how long a session stays known without being said again. ``grace_s``: how long a leaving user has.

    Nothing can be asked until `renewed`.
    """

    def __init__(self, *, life_s: float, grace_s: float) -> None:
        self._life_s = life_s
        self._grace_s = grace_s
        self._away = True
        self._not_before = 0.0
        self._wants: dict[Session, Want] = {}
        self._of_user: dict[str, set[Session]] = {}
        self._unchecked: dict[Session, None] = {}
        self._checked: dict[Session, float] = {}
        self._watched: dict[str, Watched] = {}
        self._due: list[tuple[float, str]] = []
        self._fresh: deque[tuple[Session, str]] = deque()
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._watched)

    # Who may know of whom.

    def want(self, session: Session, users: Iterable[str]) -> None:
        """The session wants to know of these users, and of nobody else."""
        self.ended(session)
        want = Want(frozenset(users))
        if want.users:
            self._wants[session] = want
            self._unchecked[session] = None
            self._of_user.setdefault(session.user_id, set()).add(session)

    def ended(self, session: Session) -> None:
        """The session is over, or wants nothing any more."""
        want = self._wants.pop(session, None)
        if want is None:
            return
        self._unchecked.pop(session, None)
        self._checked.pop(session, None)
        mine = self._of_user[session.user_id]
        mine.discard(session)
        if not mine:
            del self._of_user[session.user_id]
        for user_id in want.users:
            watched = self._watched.get(user_id)
            if watched is not None:
                watched.drop(session)
                self._tidy(user_id, watched)

    def membership_changed(self, user_id: str) -> None:
        """The user joined or left a conversation: who may know of whom has to be checked again."""
        watched = self._watched.get(user_id)
        if watched is not None:
            for session in (*watched.sessions, *watched.strangers):
                self._check_again(session, {user_id})
        for session in self._of_user.get(user_id, ()):
            self._check_again(session, self._wants[session].users)

    def check_old(self, before: float) -> None:
        """Check again what was checked before then."""
        while self._checked:
            session, when = next(iter(self._checked.items()))
            if when >= before:
                return
            del self._checked[session]
            self._check_again(session, self._wants[session].users)

    def _check_again(self, session: Session, users: AbstractSet[str]) -> None:
        want = self._wants[session]
        want.unchecked = want.unchecked | users
        self._unchecked[session] = None

    def unchecked(self, most: int) -> list[Check]:
        """What is to be checked: about ``most`` pairs of a session and a user. Each is given out once."""
        out: list[Check] = []
        count = 0
        while self._unchecked and count < most:
            session = next(iter(self._unchecked))
            del self._unchecked[session]
            want = self._wants[session]
            out.append(Check(session, want.unchecked, want))
            count += len(want.unchecked)
            want.unchecked = frozenset()
        return out

    def checked(self, check: Check, shares: AbstractSet[str], now: float) -> None:
        """The session shares a conversation with ``shares`` and with nobody else."""
        session, users, want = check
        if self._wants.get(session) is not want:
            return
        for user_id in users:
            watched = self._watched.get(user_id)
            if watched is None:
                watched = self._watched[user_id] = Watched()
            known, was_stranger = session in watched.sessions, session in watched.strangers
            if user_id in shares:
                if not known:
                    self._admit(session, user_id, watched, now)
                continue
            watched.drop(session)
            watched.strangers.add(session)
            self._tidy(user_id, watched)
            if known or not (was_stranger or want.answered):
                self._fresh.append((session, user_id))
        want.answered = True
        self._checked.pop(session, None)
        self._checked[session] = now

    def not_checked(self, checks: Iterable[Check]) -> None:
        """They could not be checked: until they are, everybody of whom nothing was said is unknown."""
        for session, users, want in checks:
            if self._wants.get(session) is not want:
                continue
            self._check_again(session, users)
            if not want.answered:
                want.answered = True
                self._fresh.extend((session, user_id) for user_id in users)

    def _admit(self, session: Session, user_id: str, watched: Watched, now: float) -> None:
        if not watched.sessions:
            self._schedule(user_id, watched, max(now, self._not_before))
        watched.strangers.discard(session)
        watched.sessions.add(session)
        if not (watched.asked or self._away):
            watched.waiting.add(session)
        elif user_id not in self._changed:
            self._fresh.append((session, user_id))

    def _tidy(self, user_id: str, watched: Watched) -> None:
        if watched.sessions:
            return
        if watched.strangers:
            watched.forget()
        else:
            del self._watched[user_id]

    # What is known.

    def due(self, now: float, most: int) -> list[str]:
        """Whom to ask now. Each is given out once; `answered` or `not_answered` says what became of it."""
        out: list[str] = []
        while self._due and self._due[0][0] <= now and len(out) < most:
            when, user_id = heapq.heappop(self._due)
            watched = self._watched.get(user_id)
            if watched is not None and watched.due == when and watched.sessions:
                watched.due = 0.0
                out.append(user_id)
        return out

    def next_due_in(self, now: float) -> float:
        """Seconds until `due` has to be asked next; infinite while nobody is to be asked."""
        return max(0.0, self._due[0][0] - now) if self._due else float("inf")

    def answered(self, user_id: str, news: News, again_s: float, now: float) -> None:
        """The store was asked. ``again_s``: how long it will be so if nobody says anything; negative: for ever."""
        watched = self._watched.get(user_id)
        if watched is None or not watched.sessions:
            return
        if news.state != UNKNOWN and watched.learn(news):
            self._changed[user_id] = None
        watched.asked = True
        self._answer_waiting(user_id, watched)
        self._schedule(user_id, watched, now + (self._life_s if again_s < 0 else again_s + _LATER_S))

    def not_answered(self, users: Sequence[str], now: float) -> None:
        """They could not be asked; they are due again."""
        for user_id in users:
            watched = self._watched.get(user_id)
            if watched is not None and not watched.due:
                self._schedule(user_id, watched, now)

    def heard(self, user_id: str, news: News, now: float) -> None:
        """Some gateway has published it."""
        watched = self._watched.get(user_id)
        if watched is None or not watched.sessions:
            return
        if news.state == LEAVING:
            self._schedule(user_id, watched, now + self._grace_s + _LATER_S)
            return
        if watched.learn(news):
            self._changed[user_id] = None
        self._schedule(user_id, watched, now + self._life_s)

    def renewed(self, when: float) -> None:
        """The store is there (again), or was emptied: everybody is asked at ``when``, once others have told it all."""
        self._away = False
        self._not_before = when
        self._due = []
        for user_id, watched in self._watched.items():
            watched.due = when
            self._due.append((when, user_id))
        heapq.heapify(self._due)

    def away(self) -> None:
        """The store cannot be asked: nobody waits for it."""
        self._away = True
        for user_id, watched in self._watched.items():
            self._answer_waiting(user_id, watched)

    def lost(self) -> None:
        """It has been away for so long that nothing is known any more."""
        for user_id, watched in self._watched.items():
            if watched.online is not None:
                self._changed[user_id] = None
            watched.forget()

    def _answer_waiting(self, user_id: str, watched: Watched) -> None:
        self._fresh.extend((session, user_id) for session in watched.waiting)
        watched.waiting.clear()

    def _schedule(self, user_id: str, watched: Watched, when: float) -> None:
        watched.due = when
        heapq.heappush(self._due, (when, user_id))

    # What to say.

    def frames(self) -> Iterator[tuple[Session, bytes]]:
        """What is to be said now. It may be taken bit by bit, with anything happening in between."""
        while self._fresh or self._changed:
            while self._fresh:
                session, user_id = self._fresh.popleft()
                want = self._wants.get(session)
                if want is not None and user_id in want.users:
                    watched = self._watched.get(user_id)
                    yield session, frame(user_id, watched if watched and session in watched.sessions else None)
            if self._changed:
                user_id = next(iter(self._changed))
                del self._changed[user_id]
                watched = self._watched.get(user_id)
                if watched is not None:
                    made = frame(user_id, watched)
                    for session in tuple(watched.sessions):
                        if session in watched.sessions:
                            yield session, made
