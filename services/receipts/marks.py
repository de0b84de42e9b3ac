"""The rule of delivered and read (protocol §5), without SQL: what `apply_acks` must come to, for any batch.

Both facts are merges: delivered is a union of ranges, the read mark the larger pair. So late, repeated and reordered
acks end the same, whatever their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shared.ranges import EMPTY, RangeSet, delivered_mark

Refusal = Literal["stale", "beyond_head", "invisible"]
MarkKind = Literal["read", "unread"]
Pair = tuple[int, int]
"""A read mark: ``(version, seq)``, compared in this order."""


@dataclass(frozen=True, slots=True)
class View:
    """What a user may see of a conversation that ends at ``head``; ``visible`` is None for who never was a member."""

    visible: RangeSet | None
    head: int


@dataclass(frozen=True, slots=True)
class Marks:
    """What is known of one user in one conversation. ``delivered_seq`` and ``read`` only rise."""

    devices: dict[str, RangeSet] = field(default_factory=dict)
    delivered: RangeSet = EMPTY
    delivered_seq: int = 0
    read: Pair = (0, 0)


def deliver(marks: Marks, device_id: str, held: RangeSet, view: View) -> tuple[Marks, int]:
    """The marks after a device said that it stores ``held``, and how many events it acked for the first time."""
    before = marks.devices.get(device_id, EMPTY)
    gained = countable(held, view) - before
    if view.visible is None or not gained:
        return marks, 0
    delivered = marks.delivered | gained
    mark = delivered_mark(delivered, view.visible, view.head)
    after = replace(
        marks,
        devices={**marks.devices, device_id: before | gained},
        delivered=delivered,
        delivered_seq=max(marks.delivered_seq, mark),
    )
    return after, gained.count()


def countable(held: RangeSet, view: View) -> RangeSet:
    """The part of an ack that counts: what is visible and not above the head."""
    return EMPTY if view.visible is None else (held & view.visible).up_to(view.head)


def ignored(held: RangeSet, view: View) -> Refusal | None:
    """Whether an ack reaches beyond the head, or holds nothing that may be seen; None if neither."""
    if view.visible is not None and (held.highest or 0) > view.head:
        return "beyond_head"
    return None if countable(held, view) else "invisible"


def propose(marks: Marks, kind: MarkKind, pair: Pair, view: View) -> tuple[Marks, Refusal | None]:
    """The marks after a proposal of a read mark, and why it was refused; None if it was taken.

    `unread` may go back to 0: nothing is read.
    """
    version, seq = pair
    if view.visible is None:
        return marks, "invisible"
    if seq > view.head:
        return marks, "beyond_head"
    if seq not in view.visible and not (seq == 0 and kind == "unread"):
        return marks, "invisible"
    if (version, seq) <= marks.read:
        return marks, "stale"
    return replace(marks, read=(version, seq)), None
