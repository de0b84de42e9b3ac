"""A session's connection, as conversations see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.gateway.feed import Feed
    from services.gateway.session import Session


class Follower(Protocol):
    """What the fan-out needs of a session's connection. Nothing of it blocks."""

    user_id: str
    device_id: str
    session_id: str
    number: int
    session: Session

    @property
    def congested(self) -> bool:
        """Whether too much waits to be written."""

    def write(self, frames: bytes) -> None:
        """Write ready frames."""

    def handed_out(self) -> None:
        """Events were written: they may be due again earlier than anything else."""

    def wake(self) -> None:
        """Some feed is behind."""

    def load(self, conversation_id: str) -> None:
        """Send the `conversation` frame (again), and follow the conversation from then on if it is new."""

    def receipt(self, feed: Feed, user_id: str, value: bytes) -> None:
        """Tell of a user's marks, once the `conversation` frame is out."""

    def broken(self) -> None:
        """End: something at this session failed, which must not be others' fault."""
