"""A set of seqs as sorted, separate, inclusive ranges. Pure; twin of Postgres' ``int8multirange``."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OPEN = 2**63 - 1
"""The end of a range that has none: the highest seq there can be."""

Pair = tuple[int, int]


class RangeSet:
    """Immutable. ``RangeSet([(1, 5), (6, 9)])`` is the same as ``RangeSet([(1, 9)])``."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        merged: list[Pair] = []
        for low, high in sorted(pairs):
            if low > high:
                raise ValueError(f"range ends before it begins: {low} > {high}")
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._pairs: tuple[Pair, ...] = tuple(merged)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"RangeSet({list(self._pairs)})"

    def __len__(self) -> int:
        """How many ranges, not how many seqs."""
        return len(self._pairs)

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._pairs, (seq, OPEN)) - 1
        return at >= 0 and self._pairs[at][1] >= seq

    def __or__(self, other: RangeSet) -> RangeSet:
        if not other._pairs:
            return self
        return RangeSet((*self._pairs, *other._pairs))

    def __and__(self, other: RangeSet) -> RangeSet:
        out: list[Pair] = []
        mine, theirs = 0, 0
        while mine < len(self._pairs) and theirs < len(other._pairs):
            low = max(self._pairs[mine][0], other._pairs[theirs][0])
            high = min(self._pairs[mine][1], other._pairs[theirs][1])
            if low <= high:
                out.append((low, high))
            if self._pairs[mine][1] < other._pairs[theirs][1]:
                mine += 1
            else:
                theirs += 1
        return RangeSet(out)

    def __sub__(self, other: RangeSet) -> RangeSet:
        # Each cut is looked at once or twice: a client may ack in as many pieces as it likes.
        out: list[Pair] = []
        cuts = other._pairs
        at = max(0, bisect_right(cuts, (self._pairs[0][0], OPEN)) - 1) if self._pairs else 0
        for low, high in self._pairs:
            start = low
            while at < len(cuts) and cuts[at][1] < start:
                at += 1
            while at < len(cuts) and cuts[at][0] <= high:
                if cuts[at][0] > start:
                    out.append((start, cuts[at][0] - 1))
                start = cuts[at][1] + 1
                if start > high:
                    break  # it may reach into the next range, too
                at += 1
            if start <= high:
                out.append((start, high))
        return RangeSet(out)

    @property
    def lowest(self) -> int | None:
        """The lowest seq, or None if empty."""
        return self._pairs[0][0] if self._pairs else None

    @property
    def highest(self) -> int | None:
        """The highest seq (`OPEN` if the last range has no end), or None if empty."""
        return self._pairs[-1][1] if self._pairs else None

    def count(self) -> int:
        """How many seqs."""
        return sum(high - low + 1 for low, high in self._pairs)

    def seqs(self) -> Iterator[int]:
        """Each seq, ascending. Never of a set with an open end."""
        for low, high in self._pairs:
            yield from range(low, high + 1)

    def up_to(self, head: int) -> RangeSet:
        """What of it is not above ``head``."""
        return self & RangeSet([(0, head)]) if head >= 0 else RangeSet()


EMPTY = RangeSet()


def visible_head(visible: RangeSet, head: int) -> int:
    """The last seq that somebody who may read ``visible`` sees of a timeline that ends at ``head``; 0 if none."""
    return visible.up_to(head).highest or 0


def held_up_to(held: RangeSet, visible: RangeSet, head: int) -> int:
    """Everything visible up to it is in ``held``: the cursor of a device whose acks are ``held``."""
    missing = (visible.up_to(head) - held).lowest
    return visible_head(visible, head) if missing is None else missing - 1


def delivered_mark(held: RangeSet, visible: RangeSet, head: int) -> int:
    """The highest seq of ``held`` with everything visible below it in ``held`` too; 0 if none."""
    return visible_head(held & visible, held_up_to(held, visible, head))
