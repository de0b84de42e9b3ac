"""What a series of measurements comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Figures = dict[str, float]
"""By name: `rate_s` per second, `…_ms` in milliseconds."""

MORE_IS_BETTER = frozenset({"rate_s", "rate_s_wide", "drain_rows_s", "c_deliveries_s"})
"""Figures of which more is better; of every other one less is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's turn: latencies in seconds; of a closed loop also what was done per second, else None."""

    latencies: Sequence[float]
    rate_s: float | None = None

    def figures(self) -> Figures:
        """Rate and percentiles. Raises `ValueError` without a measurement."""
        if not self.latencies:
            raise ValueError("nothing was measured")
        rate = {} if self.rate_s is None else {"rate_s": round(self.rate_s, 1)}
        return rate | {
            "p50_ms": round(percentile(self.latencies, 0.50) * 1000, 2),
            "p99_ms": round(percentile(self.latencies, 0.99) * 1000, 2),
        }


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile of at least one value."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


def medians(turns: Sequence[Figures]) -> Figures:
    """The median of each figure over several turns."""
    return {name: round(median(turn[name] for turn in turns), 2) for name in turns[0]}


def ratio(waybill: Mapping[str, float], peer: Mapping[str, float]) -> Figures:
    """How many times better Waybill is, of each figure that both have; 1 = equal.

    A figure whose divisor would be 0 is left out.
    """
    found: Figures = {}
    for name in waybill.keys() & peer.keys():
        better, worse = (waybill, peer) if name in MORE_IS_BETTER else (peer, waybill)
        if worse[name] > 0:
            found[name] = round(better[name] / worse[name], 2)
    return {name: found[name] for name in waybill if name in found}
