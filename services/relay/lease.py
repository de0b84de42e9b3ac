"""The rules of leases, without clock, socket or pool: who holds how many shards, and when trust in a lease ends.

What the database decides: who owns a shard, and whether a lease has ended (its own clock, its own row). What local
time may decide: only that this process no longer trusts a lease, which is always earlier than the database's end of
it, since the time is taken before the statement that renews it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

SHARDS = 64

CLOSE_S = 0.5
"""Bound of the time that closing a failed Kafka client takes."""

_MARGIN_S = 0.5
"""At least so much of a lease is left for renewing it: less, and each slow statement would stop the sending."""

_LOOK_EVERY_S = 0.4


@dataclass(frozen=True, slots=True)
class Timing:
    """``lease_s`` is the length of a lease, ``delivery_s`` for how long a batch may be with the Kafka client."""

    lease_s: float
    delivery_s: float

    @property
    def longest_s(self) -> float:
        """The longest possible delivery: all of the client's tries, then getting rid of it."""
        return self.delivery_s + CLOSE_S

    @property
    def renew_every_s(self) -> float:
        """Three renewals may fail, or be late, before sending stops."""
        return (self.lease_s - self.longest_s) / 3

    @property
    def look_every_s(self) -> float:
        """How often to look for shards that came free: a dead relay's are taken within the lease and a second."""
        return min(_LOOK_EVERY_S, self.renew_every_s)

    def trusted_until(self, sent_at: float) -> float:
        """When trust in a lease ends, whose statement was sent at ``sent_at`` (monotonic seconds, as the result)."""
        return sent_at + self.lease_s

    def may_send(self, trusted_until: float, now: float) -> bool:
        """Whether a batch handed over now is surely confirmed or given up while the lease lasts."""
        return now + self.longest_s <= trusted_until

    def problem(self) -> str | None:
        """Why no lease may be of this length, with the sum; None if it may."""
        needed = self.longest_s + _MARGIN_S
        if self.lease_s > needed:
            return None
        return (
            f"a lease of {_ms(self.lease_s)} ms is not longer than the longest delivery: "
            f"{_ms(self.delivery_s)} (WAYBILL_RELAY_DELIVERY_TIMEOUT_MS: request, retries and waits between them) "
            f"+ {_ms(CLOSE_S)} (closing the failed client) + {_ms(_MARGIN_S)} (renewing the lease) = {_ms(needed)} ms"
        )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Plan:
    """``take``: at most so many free shards. ``give_up``: these of those held."""

    take: int
    give_up: tuple[int, ...]


def quota(me: str, live: Collection[str]) -> int:
    """How many shards ``me`` should hold beside the other live owners.

    All quotas add up to `SHARDS`, and none differs from another by more than one.
    """
    owners = sorted({*live, me})
    share, rest = divmod(SHARDS, len(owners))
    return share + (owners.index(me) < rest)


def plan(me: str, live: Collection[str], held: Collection[int]) -> Plan:
    """The way from what ``me`` holds to its quota. Shards that need not move stay."""
    surplus = len(held) - quota(me, live)
    return Plan(max(0, -surplus), tuple(sorted(held, reverse=True)[: max(0, surplus)]))
