"""How a session ends."""

from __future__ import annotations


class Close(Exception):  # noqa: N818 - it is how a session ends, not always an error
    """The session ends with this close code (protocol §3) and this reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
