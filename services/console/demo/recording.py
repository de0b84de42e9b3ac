"""What one device read from its socket and showed to its user, noted at that moment and never corrected."""

from __future__ import annotations

from dataclasses import dataclass, field

Mark = tuple[int, int]
"""A read mark: (version, seq)."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An event that the app displayed, in the order of displaying."""

    conversation_id: str
    seq: int
    event_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Pushed:
    """An `event` frame as it came from the socket, repeats and all, before the SDK looked at it."""

    session: int
    conversation_id: str
    seq: int
    event_id: str
    client_msg_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """How far another user, or this user's other devices, had a conversation by what the app displayed then."""

    conversation_id: str
    user_id: str
    delivered_seq: int
    read: Mark


@dataclass(slots=True)
class Recording:
    """The raw lists of one device. Times are seconds of the one monotonic clock of the whole demo."""

    user_id: str
    device_id: str
    shown: list[Shown] = field(default_factory=list)
    pushed: list[Pushed] = field(default_factory=list)
    opened: dict[int, float] = field(default_factory=dict)
    """When `hello` was written, by session."""
    resend_s: dict[int, float] = field(default_factory=dict)
    """How long the server waits for an ack before it sends an event again, by session, as `welcome` told it."""
    starts: dict[tuple[int, str], int] = field(default_factory=dict)
    """Where pushing began, by session and conversation: the cursor of the first `conversation` frame."""
    ticks: list[Tick] = field(default_factory=list)
    written: dict[str, float] = field(default_factory=dict)
    """When a send was first written to the socket, by `client_msg_id`."""
    acked: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Conversation and event id that `sent` named, by `client_msg_id`."""
    online: list[tuple[float, float]] = field(default_factory=list)
    """When the app was open: from its first listing to its end."""
