"""A session that keeps what it was told."""

import json
from typing import Any


def payload(frame: bytes) -> dict[str, Any]:
    """The JSON of one ready frame."""
    assert frame[0] == 0x81
    start = 2 if frame[1] < 126 else 4 if frame[1] == 126 else 10
    return dict(json.loads(frame[start:]))


class Told:
    """Stands for a connection. ``states``: the last (online, since) of each user; ``frames``: all, as they came."""

    def __init__(self, user_id: str, session_id: str = "") -> None:
        self.user_id = user_id
        self.session_id = session_id or user_id
        self.congested = False
        self.frames: list[dict[str, Any]] = []

    def write(self, frames: bytes) -> None:
        self.frames.append(payload(frames))

    @property
    def states(self) -> dict[str, tuple[bool | None, str | None]]:
        return {one["user_id"]: (one["online"], one["since"]) for one in self.frames if one["t"] == "presence"}

    def online(self, user_id: str) -> list[bool | None]:
        """All that was said of a user."""
        return [one["online"] for one in self.frames if one["t"] == "presence" and one["user_id"] == user_id]
