"""What marks must be, without SQL: `receipt_differences` and `mend_receipts` must come to the same.

Marks are merges (protocol §5): a user's ranges are the union of the devices', `delivered_seq` follows from them and
only rises, a read mark is a pair that only grows. So nothing here is lowered by itself but what claims the impossible:
seqs that the timeline does not have, or that the user may not see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shared.ranges import EMPTY, OPEN, RangeSet, delivered_mark, visible_head

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal[
    "no_member",
    "beyond_head",
    "invisible",
    "union_behind",
    "union_ahead",
    "mark_beyond_head",
    "mark_behind",
    "mark_ahead",
    "mark_kept",
    "read_beyond_head",
    "read_invisible",
]

NOTED = frozenset({"union_ahead", "mark_kept"})
"""Told, but no fault and never mended: devices may be forgotten, and what they held is still delivered; who is shown
more of the past holds less than all of it, and the tick that they had stays."""

LOWERING = frozenset({"mark_ahead"})
"""Mended only when asked for by itself: a tick goes back."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored of one user in one conversation. ``visible`` None: no member; ``head`` 0: no conversation."""

    visible: RangeSet | None
    head: int
    devices: Mapping[str, RangeSet] = field(default_factory=dict)
    delivered: RangeSet = EMPTY
    delivered_seq: int = 0
    read: tuple[int, int] = (0, 0)

    @property
    def valid(self) -> RangeSet:
        """The seqs that can be acked at all."""
        return EMPTY if self.visible is None else self.visible.up_to(self.head)


@dataclass(frozen=True, slots=True)
class Difference:
    """``seqs``: those that are there and should not be, or of `union_behind` those that are missing.

    ``found``, ``wanted``: of a mark. ``device_id``: of the device's own ranges; None: of the user's.
    """

    kind: Kind
    device_id: str | None = None
    seqs: RangeSet = EMPTY
    found: int | None = None
    wanted: int | None = None


def differences(stored: Stored) -> list[Difference]:
    """What is wrong, by kind and then by device, the user's own first."""
    if stored.visible is None or not stored.head:
        return [Difference("no_member", seqs=stored.delivered)]
    found = [*_impossible(stored), *_union(stored), *_marks(stored, stored.visible)]
    return sorted(found, key=lambda one: (one.kind, one.device_id is not None, one.device_id or ""))


def mends(kind: Kind, *, lower: bool) -> bool:
    """Whether a repair mends it."""
    return kind not in NOTED and (lower or kind not in LOWERING)


def repaired(stored: Stored, *, lower: bool = False) -> Stored | None:
    """The marks after a repair; None if nothing of them is kept."""
    if stored.visible is None or not stored.head:
        return None
    every = _every(stored)
    mark = delivered_mark(every, stored.visible, stored.head)
    most = visible_head(stored.visible, stored.head)
    possible = min(stored.delivered_seq, most)
    version, seq = stored.read
    return Stored(
        stored.visible,
        stored.head,
        {device_id: held & stored.valid for device_id, held in stored.devices.items()},
        every,
        mark if lower and possible not in every else max(possible, mark),
        stored.read
        if _read_holds(stored)
        else (min(version + 1, OPEN), visible_head(stored.visible, min(stored.head, seq))),
    )


def _impossible(stored: Stored) -> list[Difference]:
    found: list[Difference] = []
    above = RangeSet([(stored.head + 1, OPEN)])
    for device_id, held in (None, stored.delivered), *stored.devices.items():
        if beyond := held & above:
            found.append(Difference("beyond_head", device_id, beyond))
        if hidden := held - above - stored.valid:
            found.append(Difference("invisible", device_id, hidden))
    return found


def _union(stored: Stored) -> list[Difference]:
    own, of_devices = stored.delivered & stored.valid, _of_devices(stored)
    found: list[Difference] = []
    if missing := of_devices - own:
        found.append(Difference("union_behind", seqs=missing))
    if more := own - of_devices:
        found.append(Difference("union_ahead", seqs=more))
    return found


def _marks(stored: Stored, visible: RangeSet) -> list[Difference]:
    found: list[Difference] = []
    every = _every(stored)
    mark, most = delivered_mark(every, visible, stored.head), visible_head(visible, stored.head)
    possible = min(stored.delivered_seq, most)
    if stored.delivered_seq > most:
        found.append(Difference("mark_beyond_head", found=stored.delivered_seq, wanted=most))
    if possible < mark:
        found.append(Difference("mark_behind", found=possible, wanted=mark))
    if possible > mark:
        found.append(Difference("mark_kept" if possible in every else "mark_ahead", found=possible, wanted=mark))
    _, seq = stored.read
    if not _read_holds(stored):
        kind: Kind = "read_beyond_head" if seq > stored.head else "read_invisible"
        found.append(Difference(kind, found=seq, wanted=visible_head(visible, min(stored.head, seq))))
    return found


def _of_devices(stored: Stored) -> RangeSet:
    return RangeSet(pair for held in stored.devices.values() for pair in held) & stored.valid


def _every(stored: Stored) -> RangeSet:
    return stored.delivered & stored.valid | _of_devices(stored)


def _read_holds(stored: Stored) -> bool:
    _, seq = stored.read
    return seq == 0 or seq in stored.valid
