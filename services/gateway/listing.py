"""Users' conversations as their devices see them: what `conversation` frames say, for many sessions at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from services.gateway.since import Since
from shared.errors import UnavailableError
from shared.postgres import unavailable_if_away
from shared.ranges import OPEN, RangeSet
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_CONVERSATIONS_OF = _SQL["conversations_of_users"]
_CHANGED = _SQL["changed_since"]
_LIST = _SQL["list_conversations"]
_INCARNATION = _SQL["incarnation"]

LIST_AT_ONCE = 2_000
"""Rows of one listing query."""

_USERS_AT_ONCE = 500
_ENCODE = msgspec.json.Encoder().encode

T = TypeVar("T")


class Marks(msgspec.Struct, frozen=True, gc=False):
    """A user's receipt marks in a conversation."""

    user_id: str
    delivered_seq: int
    read_seq: int
    read_version: int

    def frame(self, conversation_id: str) -> bytes:
        """The `receipt` frame. Ids hold nothing that JSON escapes."""
        return (
            f'{{"t":"receipt","conversation_id":"{conversation_id}","user_id":"{self.user_id}",'
            f'"delivered_seq":{self.delivered_seq},"read_seq":{self.read_seq},"read_version":{self.read_version}}}'
        ).encode()


class Wanted(NamedTuple):
    """A conversation to list for a device. ``seq``, ``event_id``: what the device holds and which event it has there.

    All ids are UUIDs or names; the event's id is looked at only with a seq above 0.
    """

    user_id: str
    device_id: str
    conversation_id: str
    seq: int | None = None
    event_id: str | None = None


class Listed(msgspec.Struct, frozen=True):
    """One conversation in one snapshot. ``as_of`` is its head for everybody, ``head`` what this user sees of it.

    ``record``: the device's cursor as its acks tell it. ``peer``: the other one's marks in a direct chat.
    ``updated_at``: when the head's event was made. ``mismatch``: the device named an event that is not at that seq.
    ``muted_until``: None unless the user has muted it, and empty for ever.
    """

    conversation_id: str
    kind: str
    title: str | None
    keeps_history: bool
    as_of: int
    role: str
    visible: RangeSet
    head: int
    record: int
    mine: Marks
    unread: int
    updated_at: str | None
    peer: Marks | None
    mismatch: bool = False
    muted_until: str | None = None
    archived: bool = False

    @property
    def muted(self) -> bool:
        """Whether the user has muted it, and the time has not passed."""
        return self.muted_until is not None

    @property
    def member(self) -> bool:
        """Whether the user is a member now."""
        return self.visible.highest == OPEN

    @property
    def first_cursor(self) -> int:
        """One below the first visible seq."""
        return (self.visible.lowest or 1) - 1

    def frame(self, cursor: int, *, reset: bool = False) -> bytes:
        """The `conversation` frame. Written by hand: only the title can hold what JSON escapes."""
        title = "null" if self.title is None else _ENCODE(self.title).decode()
        updated_at = "null" if self.updated_at is None else f'"{self.updated_at}"'
        mine = self.mine
        return (
            f'{{"t":"conversation","conversation_id":"{self.conversation_id}","kind":"{self.kind}","title":{title},'
            f'"role":"{self.role}","head":{self.head},"visible":{_pairs(self.visible)},"cursor":{cursor},'
            f'"delivered_seq":{mine.delivered_seq},"read_seq":{mine.read_seq},"read_version":{mine.read_version},'
            f'"unread":{self.unread},"updated_at":{updated_at},{self._settings()}{_RESET if reset else ""}}}'
        ).encode()

    def _settings(self) -> str:
        if self.muted_until is None and not self.archived:
            return _PLAIN
        archived = "true" if self.archived else "false"
        until = f',"muted_until":"{self.muted_until}"' if self.muted_until else ""
        return f'"muted":{"true" if self.muted else "false"}{until},"archived":{archived}'

    def peer_frame(self) -> bytes | None:
        """The peer's `receipt` frame that follows a direct chat, if there is one."""
        return None if self.peer is None else self.peer.frame(self.conversation_id)


class Listing(NamedTuple):
    """``rows``: one per element that was wanted, in its order; None where the user was never a member.

    ``since``: the oldest of the snapshots that it was read in; None if nothing was wanted.
    """

    since: Since | None
    rows: list[Listed | None]


class Belongings(NamedTuple):
    """Conversations of a user in one snapshot, in parallel: their ids, heads, and whether each one changed."""

    ids: list[str]
    heads: list[int]
    changed: list[bool]


class Changes(NamedTuple):
    """``since``: the snapshot, to be told to clients as `since`. ``users``: one per user, as they were asked for."""

    since: Since
    users: list[Belongings]


async def conversations_of_users(pool: Pool, users: Collection[str]) -> dict[str, list[str]]:
    """By user the ids of every conversation that they are or were a member of. Raises `UnavailableError`.

    Not for `hello`: what `listed` says as `since` must come from the snapshot that the user's conversations were found
    in (`changed_since`). One that came later would hide from the next `hello` what was added in between.
    """
    found: dict[str, list[str]] = {user_id: [] for user_id in users}
    with unavailable_if_away():
        for some in _parts(list(found), _USERS_AT_ONCE):
            for row in await pool.fetch(_CONVERSATIONS_OF, some):
                found[row["user_id"]] = row["ids"].split(",")
    return found


async def changed_since(pool: Pool, asked: Sequence[tuple[str, int | None]]) -> Changes:
    """Of each user all conversations, and which of them changed from that transaction on (None: all of them).

    Changed: the conversation, the user's own membership or marks, or a direct peer's marks. At least one user; the same
    one may be asked for several times. One statement, so one snapshot. Raises `UnavailableError`.
    """
    with unavailable_if_away():
        rows = await pool.fetch(
            _CHANGED,
            [user_id for user_id, _ in asked],
            _array(since for _, since in asked),
        )
    return Changes(_since(rows[0]), [_belongings(row) for row in rows])


async def store_incarnation(pool: Pool) -> str:
    """Which life of which store this is. Raises `UnavailableError`, also where the server is a standby."""
    with unavailable_if_away():
        incarnation: str | None = await pool.fetchval(_INCARNATION)
    return _primary(incarnation)


async def list_conversations(pool: Pool, wanted: Sequence[Wanted]) -> Listing:
    """These conversations as the devices see them, `LIST_AT_ONCE` to a query and so to a snapshot.

    Raises `UnavailableError`, also if the store became another one between two queries.
    """
    rows: list[Listed | None] = []
    since: Since | None = None
    for some in _parts(wanted, LIST_AT_ONCE):
        users, devices, ids, seqs, event_ids = zip(*some, strict=True)
        with unavailable_if_away():
            found = await pool.fetch(_LIST, users, devices, _array(ids), _array(seqs), _array(event_ids))
        now = _since(found[0])
        if since is not None and now.incarnation != since.incarnation:
            raise UnavailableError("the store was replaced", retry_after_ms=1000)
        since = now if since is None else min(since, now)
        rows += map(_listed, some, found)
    return Listing(since, rows)


def newest_first(listed: Listed) -> tuple[bool, str]:
    """What conversations are sorted by, descending: those with unread events first, newest first."""
    return listed.unread > 0, listed.updated_at or ""


_RESET = ',"reset":true'
_PLAIN = '"muted":false,"archived":false'


def _listed(wanted: Wanted, row: Record) -> Listed | None:
    (
        _, _, kind, title, keeps_history, as_of, role, visible, head, record, delivered_seq, read_seq, read_version,
        unread, muted_until, archived, updated_at, mismatch, peer_id, peer_delivered_seq, peer_read_seq,
        peer_read_version,
    ) = row  # fmt: skip
    if kind is None:
        return None
    user_id = wanted.user_id
    return Listed(
        wanted.conversation_id,
        kind,
        title,
        keeps_history,
        as_of,
        role,
        _visible(visible),
        head,
        record,
        Marks(user_id, 0, 0, 0) if read_seq is None else Marks(user_id, delivered_seq, read_seq, read_version),
        unread,
        updated_at,
        None if peer_id is None else Marks(peer_id, peer_delivered_seq, peer_read_seq, peer_read_version),
        mismatch,
        muted_until,
        archived,
    )


def _belongings(row: Record) -> Belongings:
    ids: str | None = row["ids"]
    if ids is None:
        return Belongings([], [], [])
    return Belongings(ids.split(","), list(map(int, row["heads"].split(","))), [flag == "1" for flag in row["changed"]])


def _since(row: Record) -> Since:
    return Since(_primary(row["incarnation"]), int(row["xmin"]))


def _primary(incarnation: str | None) -> str:
    if incarnation is None:
        raise UnavailableError("the store is a standby", retry_after_ms=1000)
    return incarnation


def _array(values: Iterable[object]) -> str:
    """The text of an array of numbers or UUIDs, which costs far less than asyncpg's own encoding."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


@lru_cache(4_096)
def _visible(text: str) -> RangeSet:
    """The text of an ``int8multirange``. Most members see one open range, so that few texts are new."""
    pairs = []
    for part in text[2:-2].split("),["):
        low, _, high = part.partition(",")
        pairs.append((int(low), int(high) - 1 if high else OPEN))
    return RangeSet(pairs)


@lru_cache(4_096)
def _pairs(visible: RangeSet) -> str:
    return "[" + ",".join(f"[{low},{'null' if high == OPEN else high}]" for low, high in visible) + "]"


def _parts(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
