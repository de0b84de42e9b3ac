"""How long messages took, from the recordings. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.console.demo.recording import Recording


class Flight(NamedTuple):
    """One message's way to one device: seconds on the demo's clock."""

    written: float
    read: float


def flights(recordings: Sequence[Recording]) -> list[Flight]:
    """`send` written → `event` read, for each message and each device but its sender's own whose app was open then."""
    written: dict[str, tuple[float, str]] = {}
    for recording in recordings:
        for client_msg_id, at in recording.written.items():
            written[client_msg_id] = (at, recording.device_id)
    found: list[Flight] = []
    for recording in recordings:
        seen: set[str] = set()
        for event in recording.pushed:
            origin = written.get(event.client_msg_id)
            if origin is None or origin[1] == recording.device_id or event.client_msg_id in seen:
                continue
            seen.add(event.client_msg_id)
            if any(start <= origin[0] and event.at <= end for start, end in recording.online):
                found.append(Flight(origin[0], event.at))
    return found


def outside(found: Iterable[Flight], faults: Iterable[tuple[float, float]]) -> list[Flight]:
    """Those that no fault (from SIGKILL to recovery) fell into."""
    windows = list(faults)
    return [one for one in found if not any(one.written <= end and one.read >= start for start, end in windows)]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)] if ranked else None
