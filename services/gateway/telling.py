"""From a receipt to the sessions that hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.gateway.wire import ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from services.gateway.feed import Feed
    from services.gateway.follower import Follower
    from services.gateway.room import Room
    from services.gateway.watching import Watching

SETTINGS = "settings"
"""The kind of a record that says that a user's own settings of a conversation have changed."""

_DIRECT = 8
"""More sessions than this in a conversation of unknown kind, and it is taken for a group."""


class _Receipt(msgspec.Struct, frozen=True):
    user_id: str
    read_version: int
    read_seq: int = 0
    device_id: str | None = None
    kind: str = ""


_RECEIPT = msgspec.json.Decoder(_Receipt)


class Telling:
    """``users``: the local sessions by user. ``give_up``: of a session at which it failed, in the handler of that."""

    def __init__(self, users: Mapping[str, set[Follower]], watching: Watching, give_up: Callable[[Feed], None]) -> None:
        self._users = users
        self._watching = watching
        self._give_up = give_up

    def receipt(self, room: Room, value: bytes) -> None:
        """For all sessions of its user, and in a direct chat, or for who watches, the others'.

        One with a ``device_id`` answers a refused mark and is for that device alone. One of the kind `settings` says
        that the user's own settings have changed, which no other user hears of. Raises `msgspec.MsgspecError`.
        """
        receipt = _RECEIPT.decode(value)
        if receipt.kind == SETTINGS:
            self._load_again(room, receipt.user_id)
            return
        own = self._users.get(receipt.user_id)
        if not own and room.direct is False and not room.watched:
            return  # as most of a group's: nobody here hears of it
        frame = ready(value)
        for follower in list(own or ()):
            feed = room.feeds.get(follower)
            if feed is not None and receipt.device_id in (None, follower.device_id):
                refused = receipt.device_id is not None
                feed.marked(receipt.read_version, receipt.read_seq, refused=refused)
                self._tell(feed, receipt.user_id, frame)
        if receipt.device_id is not None:
            return
        self._watching.receipt(room, receipt.user_id, frame)
        for feed in _concerned(room):
            if feed.owner.user_id != receipt.user_id and (feed.member or feed.fresh):
                self._tell(feed, receipt.user_id, frame)

    def _load_again(self, room: Room, user_id: str) -> None:
        for follower in list(self._users.get(user_id, ())):
            feed = room.feeds.get(follower)
            if feed is not None:
                feed.asleep = False
                follower.load(room.conversation_id)

    def _tell(self, feed: Feed, user_id: str, frame: bytes) -> None:
        try:
            feed.owner.receipt(feed, user_id, frame)
        except Exception:  # noqa: BLE001 - one recipient's fault stops nobody else
            self._give_up(feed)


def _concerned(room: Room) -> Sequence[Feed]:
    """Who hears of others' marks at once: all of a direct chat, and of what may be one."""
    if room.direct is None and len(room.feeds) > _DIRECT:
        # It is a group, most likely, whose sessions all sleep. To wake them all would be the burst they avoid.
        next(iter(room.feeds.values())).wake()
        return ()
    return () if room.direct is False else room.listed()
