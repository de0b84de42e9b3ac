"""`waybill bench receipts`: from acks in Kafka to marks in Postgres, from an ack to the peer's `receipt`, and growth.

- ``rate``: a topic of acks (`bench/acks.py` says of which) is drained by one receipts process, which folds them and
  writes ranges, marks and the records that announce them; then by the plain consumer of
  `bench/reference/plain_acks.py`, which writes one upsert per ack. Both on the same Postgres and the same Kafka.
- ``ticks``: how long it takes from a member's `ack` to the other's `receipt`, socket to socket (`receipts_ticks.py`).
- ``growth``: what a message leaves in each table of Waybill (`receipts_growth.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench import receipts_growth, receipts_services
from bench.acks import BUSY, WIDE, acks
from bench.figures import medians, ratio
from bench.receipts_drain import Bench
from bench.receipts_ticks import TickBench
from bench.stage import say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from bench.acks import Mix
    from bench.figures import Figures
    from bench.receipts_services import Services
    from deploy.local.stack import Stack

    Ways = dict[str, Callable[[], Awaitable[Figures]]]
    Turns = dict[str, list[Figures]]
    """By side."""

PARTS = ("rate", "ticks", "growth")
MIXES = {mix.name: mix for mix in (BUSY, WIDE)}
PARALLEL = 8
"""Connections of the reference where it writes several acks at a time."""

COMPARED = ("rate_s", "p50_ms", "p99_ms")
FURTHER = ("cpu_s_per_million", "rate_s_wide", "cpu_s_per_million_wide")
"""What the protocol names, and what else is compared."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``seconds`` of a turn: of the ticks, and of the reference's draining; Waybill drains all ``acks``.

    ``profile``: a folder for profiles of the receipts process; without it no profiler runs.
    """

    alone: bool = False
    rounds: int = 3
    seconds: float = 8.0
    acks: int = 200_000
    rate: float = 500.0
    messages: int = 6_000
    parts: tuple[str, ...] = PARTS
    mixes: tuple[str, ...] = tuple(MIXES)
    profile: Path | None = None


async def measure(stack: Stack, folder: Path, settings: Settings) -> dict[str, object]:
    """Both sides in turn and the medians of the turns: the result but for machine, date and command.

    Raises `RuntimeError` if a side stalls or fails.
    """
    turns: dict[str, Turns] = {}
    found: dict[str, object] = {"name": "receipts"}
    if "rate" in settings.parts:
        for name in settings.mixes:
            turns[name] = await _rates(stack, folder, MIXES[name], settings)
    if {"ticks", "growth"} & set(settings.parts):
        async with receipts_services.running(stack, folder) as services:
            if "ticks" in settings.parts:
                turns["ticks"] = await _ticks(stack, folder, services, settings)
            if "growth" in settings.parts:
                say(f"growth: {settings.messages:,} messages")
                found["growth"] = await receipts_growth.measure(stack, services, settings.messages)
    return {**found, **compared(turns), "turns": turns, "settings": _told(settings)}


def compared(turns: Mapping[str, Turns]) -> dict[str, Figures]:
    """The figures of each side over its parts, and the ratios. Those of the second mix bear its name."""
    found: dict[str, Figures] = {}
    for part, sides in turns.items():
        suffix = f"_{part}" if part == WIDE.name else ""
        for side, of in sides.items():
            found.setdefault(side, {}).update({f"{name}{suffix}": value for name, value in medians(of).items()})
    for side in [side for side in found if side.startswith("peer")]:
        both = {name: found["waybill"][name] for name in (*COMPARED, *FURTHER) if name in found["waybill"]}
        found[side.replace("peer", "ratio")] = ratio(both, found[side])
    return found


async def _rates(stack: Stack, folder: Path, mix: Mix, settings: Settings) -> Turns:
    bench = Bench(stack, folder, mix, acks(mix, settings.acks), settings.profile)
    await bench.prepare()
    ways: Ways = {"waybill": bench.waybill}
    if not settings.alone:
        ways["peer"] = lambda: bench.peer(seconds=settings.seconds, connections=1)
        if mix is BUSY:
            ways["peer_parallel"] = lambda: bench.peer(seconds=settings.seconds, connections=PARALLEL)
    return await _in_turn(mix.name, ways, settings.rounds)


async def _ticks(stack: Stack, folder: Path, services: Services, settings: Settings) -> Turns:
    bench = TickBench(stack, folder, services, rate_s=settings.rate, seconds=settings.seconds)
    ways: Ways = {"waybill": bench.waybill}
    if not settings.alone:
        ways["peer"] = bench.peer
    return await _in_turn("ticks", ways, settings.rounds)


async def _in_turn(what: str, ways: Ways, rounds: int) -> Turns:
    """Every way once in each round."""
    turns: Turns = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            turns[name].append(await way())
            say(f"{what}, round {number + 1} of {rounds}, {name}: {turns[name][-1]}")
    return turns


def _told(settings: Settings) -> dict[str, object]:
    told = asdict(settings)
    profile = told.pop("profile")
    return {**told, **({} if profile is None else {"profile": str(profile)})}
