"""Receipts that a session cannot take yet: the newest of each kind, and so three at most of a conversation. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.gateway.feed import Feed

OWN, PEER, OTHERS = range(3)
"""Whose marks wait: the user's own, the peer's of a direct chat, or what a watcher of a group hears first."""


class Held:
    """Frames by conversation and whose marks they tell."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int], bytes] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._frames)

    def keep(self, feed: Feed, whose: int, frames: bytes) -> None:
        """Keep the newest, and ask for the `conversation` frame that has to come first."""
        self._frames[feed.conversation_id, whose] = frames
        feed.wake()

    def take(self, feeds: Mapping[str, Feed]) -> bytes:
        """What may go out now; what nobody is to hear any more is forgotten."""
        left: dict[tuple[str, int], bytes] = {}
        frames: list[bytes] = []
        for (conversation_id, whose), held in self._frames.items():
            feed = feeds.get(conversation_id)
            if feed is None:
                continue
            if feed.loading:
                left[conversation_id, whose] = held
            elif whose == OWN or (feed.direct if whose == PEER else feed.watching and feed.member):
                frames.append(held)
        self._frames = left
        return b"".join(frames)
