"""Acks folded: released seqs of many events leave as few frames. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._frames import encode

if TYPE_CHECKING:
    from .timeline import Timeline

MAX_RANGES = 1_000
"""The protocol's limit for one frame."""


class Acks:
    """Says when the acks of a set of timelines are due, and builds their frames."""

    def __init__(self, delay_s: float, many: int) -> None:
        self._delay_s = delay_s
        self._many = many
        self._since: float | None = None
        self._count = 0
        self._dirty: dict[str, Timeline] = {}

    def released(self, timeline: Timeline, count: int, now: float) -> None:
        """Note that ``count`` seqs of this timeline were added to its ``to_ack``."""
        self._dirty[timeline.conversation_id] = timeline
        self._count += count
        if self._since is None:
            self._since = now

    def due_at(self) -> float | None:
        """Return when to flush, None if nothing waits; ``many`` events are due at once."""
        if self._since is None:
            return None
        return self._since if self._count >= self._many else self._since + self._delay_s

    def flush(self) -> list[bytes]:
        """Return the frames of everything that waits."""
        frames: list[bytes] = []
        for timeline in self._dirty.values():
            while timeline.to_ack:
                ranges = timeline.to_ack.take(MAX_RANGES)
                frames.append(encode({"t": "ack", "conversation_id": timeline.conversation_id, "ranges": ranges}))
        self._dirty.clear()
        self._since, self._count = None, 0
        return frames
