"""What the app asked for that no answer ends: watches, whose presence it wants, and when it last said `typing`. Pure.

A server keeps it for one session only, so it is said again on the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._frames import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_PRESENCE = 200
"""The protocol's limit for one frame."""
TYPING_EVERY_S = 2.0
"""A `typing` sooner after the last one of its conversation is not sent: the server would drop it."""
AGAIN_S = 1.0
AGAIN_CAP_S = 60.0


class Standing:
    """Says what has to be said on each session, and again after the server found that there was too much at once."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._watched: dict[str, None] = {}
        self._users: tuple[str, ...] = ()
        self._typed: dict[str, float] = {}
        self._refused = 0
        self.again_at: float | None = None

    def watch(self, conversation_id: str, *, on: bool) -> bytes:
        """Note a watch, or its end; return the frame."""
        if on:
            self._watched[conversation_id] = None
        else:
            self._watched.pop(conversation_id, None)
        return _watch(conversation_id, on=on)

    def presence(self, users: Sequence[str]) -> bytes:
        """Note whose presence is wanted, in place of those before; return the frame."""
        self._users = tuple(users)
        return encode({"t": "presence", "users": list(users)})

    def typing(self, conversation_id: str, now: float) -> bytes | None:
        """Return the frame, None if the last one is too fresh."""
        self._typed = {one: at for one, at in self._typed.items() if now - at < TYPING_EVERY_S}
        if conversation_id in self._typed:
            return None
        self._typed[conversation_id] = now
        return encode({"t": "typing", "conversation_id": conversation_id})

    def frames(self) -> list[bytes]:
        """Return all that a new session has to be told."""
        told = [_watch(conversation_id, on=True) for conversation_id in self._watched]
        if self._users:
            told.append(encode({"t": "presence", "users": list(self._users)}))
        return told

    def begin(self) -> None:
        """A new session has been told all."""
        self.again_at, self._refused = None, 0

    def refused(self, now: float, retry_after_ms: int | None) -> None:
        """The server dropped a frame that has no ``rid``, for its rate: all is said again later, ever less often.

        Which one it was is not known.
        """
        if self.again_at is not None:
            return
        after_s = AGAIN_S if retry_after_ms is None else retry_after_ms / 1000
        wait_s = min(AGAIN_CAP_S, after_s * 2.0 ** min(self._refused, 16))
        self._refused += 1
        self.again_at = now + wait_s * (1 + self._random())

    def due(self, now: float) -> bool:
        """Tell, once, that the time to say all again has come."""
        if self.again_at is None or self.again_at > now:
            return False
        self.again_at = None
        return True


def _watch(conversation_id: str, *, on: bool) -> bytes:
    return encode({"t": "watch", "conversation_id": conversation_id, "on": on})
