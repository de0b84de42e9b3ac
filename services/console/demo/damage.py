"""Five ways to spoil a recording, each of one figure: a verdict that cannot fail proves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.console.demo.recording import Recording

Damage = Literal["drop", "double", "swap", "jump", "lower"]

FIGURE_OF: dict[Damage, str] = {
    "drop": "lost",
    "double": "duplicated",
    "swap": "disordered",
    "jump": "gaps",
    "lower": "regressions",
}


def spoil(recordings: Sequence[Recording], kind: Damage) -> None:
    """Damage one thing that one device displayed or read. Raises `ValueError` where there is nothing to damage."""
    if kind not in get_args(Damage):
        raise ValueError(f"unknown damage {kind!r}")
    for recording in recordings:
        if _SPOILERS[kind](recording):
            return
    raise ValueError(f"no recording is long enough for the damage {kind!r}")


def _drop(recording: Recording) -> bool:
    if not recording.shown:
        return False
    del recording.shown[len(recording.shown) // 2]
    return True


def _double(recording: Recording) -> bool:
    if not recording.shown:
        return False
    middle = len(recording.shown) // 2
    recording.shown.insert(middle, recording.shown[middle])
    return True


def _swap(recording: Recording) -> bool:
    last: dict[str, int] = {}
    for at, one in enumerate(recording.shown):
        before = last.get(one.conversation_id)
        if before is not None:
            recording.shown[before], recording.shown[at] = one, recording.shown[before]
            return True
        last[one.conversation_id] = at
    return False


def _jump(recording: Recording) -> bool:
    """As if the gateway had passed over an event that the device then had to pull: it is not among the pushed."""
    places: dict[tuple[int, str], list[int]] = {}
    for one in recording.pushed:
        seqs = places.setdefault((one.session, one.conversation_id), [])
        if not seqs or one.seq > seqs[-1]:
            seqs.append(one.seq)
    for place, seqs in places.items():
        if len(seqs) > 2:
            what = (*place, seqs[1])
            recording.pushed[:] = [p for p in recording.pushed if (p.session, p.conversation_id, p.seq) != what]
            return True
    return False


def _lower(recording: Recording) -> bool:
    for at, tick in enumerate(recording.ticks):
        if tick.delivered_seq > 0:
            recording.ticks.insert(at + 1, replace(tick, delivered_seq=tick.delivered_seq - 1))
            return True
    return False


_SPOILERS = {"drop": _drop, "double": _double, "swap": _swap, "jump": _jump, "lower": _lower}
