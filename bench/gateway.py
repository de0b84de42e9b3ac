"""`waybill bench gateway`: from Kafka to sockets, Waybill's gateway beside the library that Centrifugo is made of.

One load client (`bench/centrifugo.py`) drives both, cell by cell and in turns, on the same Kafka; each cell has fresh
server processes on its side, and nothing of the other side runs meanwhile. What the cells are: `bench/cells.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench import centrifugo, flood
from bench.cells import (
    ALL,
    BOTH,
    CELLS,
    COMPARED,
    FURTHER,
    STALLED,
    WARM_UP,
    Cell,
    added,
    details,
    errors,
    figures,
    merged,
    told,
    without_reads,
)
from bench.centrifugo import Programs, Target
from bench.figures import medians, ratio
from bench.gateway_services import Services, given
from bench.shadow import Shadow
from bench.stage import say
from deploy.migrate import migrate_async
from shared.kafka import Topics, ensure_topics

if TYPE_CHECKING:
    from pathlib import Path

    from bench.cells import Answer, Errors
    from bench.figures import Figures
    from bench.flood import Flood
    from bench.gateway_services import Gateway
    from deploy.local.stack import Stack

_READS = "waybill_catch_up_reads_total"
_SETTLE_S = 1.0
"""Between a server's start, or its end, and what comes next."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``seconds`` measured of each cell that lasts as long as one likes; ``scale``: share of each cell's connections.

    ``profile``: a folder for the profiles of Waybill's gateways; without it no profiler runs.
    """

    peer: Path = centrifugo.FOLDER
    alone: bool = False
    rounds: int = 3
    seconds: float = 15.0
    cells: tuple[str, ...] = ALL
    scale: float = 1.0
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One cell once: what it is judged by, what helps to understand it, and what went wrong."""

    figures: Figures
    details: Figures
    errors: Errors


class _Bench:
    def __init__(self, stack: Stack, folder: Path, services: Services, programs: Programs, settings: Settings) -> None:
        self._stack = stack
        self._folder = folder
        self._services = services
        self._programs = programs
        self._settings = settings
        self._topic = Topics().events

    def sides(self, name: str) -> tuple[str, ...]:
        """Who is measured in a cell, in turns."""
        return ("waybill", "peer") if name in BOTH and not self._settings.alone else ("waybill",)

    async def turn(self, side: str, name: str, label: str) -> _Turn:
        """One cell of one side."""
        if name == STALLED:
            return await self.stalled(label)
        cell = CELLS[name].scaled(self._settings.scale)
        return await (self.waybill if side == "waybill" else self.peer)(name, cell, label)

    async def waybill(self, name: str, cell: Cell, label: str) -> _Turn:
        async with self._services.gateway(label) as gateway:
            await asyncio.sleep(_SETTLE_S)
            target = self._target(gateway)
            flags = ["-setup", "-run-id", label, "-via", cell.via, *cell.flags(self._settings.seconds)]
            shadow = self._shadow()
            used, reads, rss_kib = self._services.cpu_s(), await gateway.metric(_READS), gateway.rss_kib()
            async with shadow.writing() if cell.shadowed else contextlib.nullcontext():
                answer = await self._programs.load(label, target, flags)
            reads = await gateway.metric(_READS) - reads
            detail = {f"{of}_cpu_s": round(now - used[of], 2) for of, now in self._services.cpu_s().items()}
            # The load client's own "before" is after the conversations were made.
            detail |= {"started_rss_kib": rss_kib, "catch_up_reads": reads, "postgres_behind_ms": shadow.behind_ms}
        more = {"e_without_postgres": without_reads(reads, cell.connections)} if name == "e" else {}
        return _turn(name, answer, more, {f"{name}_{of}": value for of, value in detail.items()})

    async def stalled(self, label: str) -> _Turn:
        """Waybill's, with clients that do not read beside those that do, and without them."""
        without = await self._flood(f"{label}-0", silent=0)
        with_them = await self._flood(f"{label}-1", silent=flood.STALLED)
        return _Turn(*flood.compared(without, with_them, flood.STALLED))

    async def _flood(self, label: str, *, silent: int) -> Flood:
        async with self._services.gateway(label) as gateway:
            await asyncio.sleep(_SETTLE_S)
            async with self._shadow().writing():
                return await flood.flood(
                    gateway,
                    self._target(gateway),
                    self._programs,
                    self._services,
                    silent=silent,
                    scale=self._settings.scale,
                    folder=self._folder,
                )

    async def peer(self, name: str, cell: Cell, label: str) -> _Turn:
        await self._services.stop()
        async with self._programs.peer(self._known()) as target:
            await asyncio.sleep(_SETTLE_S)
            flags = ["-run-id", label, *cell.flags(self._settings.seconds)]
            return _turn(name, await self._programs.load(label, target, flags))

    def _target(self, gateway: Gateway) -> Target:
        flags = ["-proto", "waybill", "-url", gateway.socket, "-ingest", self._services.ingest]
        return Target(flags, gateway.pids, [*self._known(), *self._services.pids])

    def _known(self) -> list[int]:
        return [os.getpid(), self._stack.pids["kafka"]]

    def _shadow(self) -> Shadow:
        return Shadow(self._stack.kafka, self._topic, self._stack.postgres_url)


def _turn(name: str, answer: Answer, more: Figures | None = None, detail: Figures | None = None) -> _Turn:
    return _Turn(figures(name, answer) | (more or {}), details(name, answer) | (detail or {}), errors(answer))


async def build(folder: Path, settings: Settings) -> None:
    """Build the load client, and the peer if it is asked for: before anything is started.

    Raises `FileNotFoundError` if their sources or Go are not there, `RuntimeError` if Go cannot.
    """
    say("building the load client" + ("" if settings.alone else " and the peer"))
    await centrifugo.build(settings.peer, folder, peer=not settings.alone)


async def measure(stack: Stack, folder: Path, settings: Settings) -> dict[str, object]:
    """Both sides in turns and the medians of the turns: the result but for machine, date and command.

    With ``alone`` there is neither `peer` nor `ratio`. `errors` holds what went wrong, by side and cell; a result with
    any is worth nothing. ``folder`` is that of `build`. Raises `RuntimeError` if a cell does not come to its end.
    """
    topics = Topics()
    await migrate_async(stack.postgres_url)
    await ensure_topics(stack.kafka, topics)
    services = Services(stack, folder, topics, settings.profile)
    programs = Programs(folder, stack.kafka, topics.events, services.secret)
    try:
        found = await _rounds(_Bench(stack, folder, services, programs, settings), settings)
    finally:
        await services.stop()
    told_settings = {
        **asdict(settings),
        "peer": settings.peer.name,
        "profile": settings.profile is not None,
        "environment": given(os.environ),
    }
    return {"name": "gateway", **found, "settings": told_settings}


async def _rounds(bench: _Bench, settings: Settings) -> dict[str, object]:
    say("warming up the broker")
    await bench.waybill("warm-up", WARM_UP, "warm-up")
    turns: dict[str, list[Figures]] = {}
    wrong: dict[str, dict[str, Errors]] = {}
    judged: dict[str, list[Figures]] = {}
    for number in range(1, settings.rounds + 1):
        done: dict[str, list[_Turn]] = {}
        for name in settings.cells:
            for side in bench.sides(name):
                turn = await bench.turn(side, name, f"{name}-{number}")
                done.setdefault(side, []).append(turn)
                say(f"round {number} of {settings.rounds}, {name}, {side}: {turn.figures | turn.details}")
                if turn.errors:
                    wrong.setdefault(side, {})[name] = added(wrong.get(side, {}).get(name, {}), turn.errors)
                    say(f"ERRORS: {told({side: {name: turn.errors}})[0]}")
                await asyncio.sleep(_SETTLE_S)
        for side, of in done.items():
            judged.setdefault(side, []).append(merged([turn.figures for turn in of]))
            turns.setdefault(side, []).append(merged([turn.figures | turn.details for turn in of]))
    return _result(judged, wrong, turns)


def _result(
    judged: dict[str, list[Figures]], wrong: dict[str, dict[str, Errors]], turns: dict[str, list[Figures]]
) -> dict[str, object]:
    found: dict[str, Figures] = {side: medians(of) for side, of in judged.items()}
    ratios = {"ratio": ratio(_compared(found["waybill"]), found["peer"])} if "peer" in found else {}
    return {**found, **ratios, "errors": wrong, "turns": turns}


def _compared(of: Figures) -> Figures:
    return {name: of[name] for name in (*COMPARED, *FURTHER) if name in of}
