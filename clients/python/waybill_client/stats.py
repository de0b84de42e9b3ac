"""Counters of what would otherwise happen in silence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts since the client was made; plain numbers that only grow."""

    connects: int = 0
    """Sessions that got as far as ``welcome``."""
    connect_failures: int = 0
    """Attempts that did not."""
    events: int = 0
    """Events taken (each seq once)."""
    repeats: int = 0
    """Events dropped because they were held already."""
    gaps: int = 0
    """Times a visible seq was jumped over; each was answered by a pull."""
    dropped_ahead: int = 0
    """Events put off because too many were ahead of a gap; the server or a pull brings them again."""
    rewinds: int = 0
    """Times the server turned out to hold less, or something else, than this device."""
    resends: int = 0
    """Requests written again: after a reconnect, an indefinite error or a missing answer."""
    refused: int = 0
    """Requests that ended in an error."""
    late_answers: int = 0
    """Answers that nobody waited for any more."""
    errors: int = 0
    """``error`` frames that belong to no request."""
    bad_frames: int = 0
    """Frames that could not be read."""
    unknown_frames: int = 0
    """Frames of a type that this version does not know."""
    acks_held: int = 0
    """Times acks were held back because the app was slow."""
