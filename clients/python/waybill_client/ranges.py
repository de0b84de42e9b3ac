"""A set of whole numbers kept as sorted, disjoint, inclusive ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ranges:
    """Cheap for seqs that mostly come in order: adding at the end is constant time, membership logarithmic."""

    __slots__ = ("_from", "_to")

    def __init__(self) -> None:
        self._from: list[int] = []
        self._to: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._from, self._to, strict=True)

    def __len__(self) -> int:
        return len(self._from)

    def __contains__(self, number: int) -> bool:
        at = bisect_left(self._to, number)
        return at < len(self._to) and self._from[at] <= number

    @property
    def first(self) -> int | None:
        """The smallest number, None if there is none."""
        return self._from[0] if self._from else None

    def add(self, low: int, high: int) -> None:
        """Add all of ``low`` to ``high``, both inclusive; neighbours become one range."""
        if self._to and low == self._to[-1] + 1:
            self._to[-1] = high
            return
        begin = bisect_left(self._to, low - 1)
        end = begin
        while end < len(self._from) and self._from[end] <= high + 1:
            low, high = min(low, self._from[end]), max(high, self._to[end])
            end += 1
        self._from[begin:end], self._to[begin:end] = [low], [high]

    def remove(self, low: int, high: int) -> None:
        """Take out all of ``low`` to ``high``, both inclusive; what is not there is no error."""
        begin = bisect_left(self._to, low)
        end = begin
        rest: list[tuple[int, int]] = []
        while end < len(self._from) and self._from[end] <= high:
            if self._from[end] < low:
                rest.append((self._from[end], low - 1))
            if self._to[end] > high:
                rest.append((high + 1, self._to[end]))
            end += 1
        self._from[begin:end], self._to[begin:end] = [a for a, _ in rest], [b for _, b in rest]

    def drop_above(self, number: int) -> None:
        """Take out everything above ``number``."""
        if self._to and self._to[-1] > number:
            self.remove(number + 1, self._to[-1])

    def drop_to(self, number: int) -> None:
        """Take out everything up to ``number``."""
        if self._from and self._from[0] <= number:
            self.remove(self._from[0], number)

    def take(self, limit: int) -> list[list[int]]:
        """Remove and return the lowest ``limit`` ranges, in the wire's form."""
        taken = [[a, b] for a, b in zip(self._from[:limit], self._to[:limit], strict=True)]
        del self._from[:limit], self._to[:limit]
        return taken
