"""`waybill bench relay`: from the outbox to Kafka, Waybill's relay beside Debezium's outbox router.

Both run on the same Postgres and the same Kafka, in turn, under one harness (`bench/harness.py`): a backlog is drained,
then transactions of ten rows come at even rates, then nothing comes. Debezium is measured as its harness sets it, and
tuned for latency. CPU counts the relay's processes and what Postgres does for them: its queries, or its walsender.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import asyncpg

from bench import backlog, harness
from bench.figures import Figures, medians, ratio
from bench.outbox import WaybillRelay, new_folder
from bench.stage import say
from deploy.local.ports import free_port
from shared.kafka import Topics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bench.harness import Harness
    from deploy.local.stack import Stack

RATE, HIGH_RATE = 1_000, 5_000
"""Rows per second of the even rates."""

TUNED = {"poll.interval.ms": "1", "producer.linger.ms": "0"}
"""What the peer is tuned by, for latency."""

COMPARED = ("drain_rows_s", "p50_ms", "p99_ms", "cpu_s_per_million", "rss_mb", "idle_cpu")
FURTHER = ("p50_ms_at_5000", "p99_ms_at_5000", "cpu_s_per_million_at_1000", "cpu_s_per_million_at_5000")
"""What the protocol names, and what else is compared."""

_PREFIX = "bench-relay"
_PEER_TOPIC = "bench-relay-peer.messages"
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """``seconds`` of each even rate, ``backlog`` rows to drain; ``deep`` rows more, in one go, by Waybill alone."""

    peer: Path = harness.FOLDER
    alone: bool = False
    rounds: int = 3
    seconds: float = 12.0
    backlog: int = 200_000
    deep: int = 0


class _Bench:
    def __init__(self, stack: Stack, folder: Path, of: Harness, settings: Settings) -> None:
        self._stack = stack
        self._folder = folder
        self._of = of
        self._settings = settings

    async def waybill(self) -> Figures:
        relay = WaybillRelay(self._stack.postgres_url, self._stack.kafka, self._folder, Topics(_PREFIX))
        await relay.make()
        try:
            return await self._measure(relay, relay.url, relay.topics.events)
        finally:
            await relay.drop()

    async def peer(self, changes: Mapping[str, str]) -> Figures:
        with new_folder() as folder:
            url = self._stack.postgres_url
            relay = self._of.peer(Path(folder), url, self._stack.kafka, _PEER_TOPIC, free_port(), changes)
            try:
                return await self._measure(relay, url, _PEER_TOPIC)
            finally:
                relay.stop()
                db = await asyncpg.connect(url, timeout=_TIMEOUT_S)
                try:
                    # Its slot would hold the log for ever.
                    await relay.drop(db)
                finally:
                    await db.close(timeout=_TIMEOUT_S)

    async def _measure(self, relay: harness.Relay, url: str, topic: str) -> Figures:
        return figures(
            await self._of.measure(
                relay,
                url,
                self._stack.kafka,
                topic=topic,
                backlog=self._settings.backlog,
                rates=[RATE, HIGH_RATE],
                seconds=self._settings.seconds,
                broker=self._stack.pids["kafka"],
            )
        )


def figures(measured: Mapping[str, object]) -> Figures:
    """The figures of one turn out of what the harness says. Raises `RuntimeError` if a row was lost or out of order."""
    found = cast("Mapping[str, _Part]", measured)
    verdict = cast("Mapping[str, int]", measured["correct"])
    if verdict["lost"] or verdict["out_of_order"]:
        raise RuntimeError(f"{measured['relay']}: {verdict['lost']} rows lost, {verdict['out_of_order']} out of order")
    drain, idle = found["drain"], found["idle"]
    low, high = cast("list[_Part]", measured["steady"])
    return {
        "drain_rows_s": _number(drain, "rows_per_s"),
        "p50_ms": _number(low, "latency_ms", "p50"),
        "p99_ms": _number(low, "latency_ms", "p99"),
        "cpu_s_per_million": _cpu(drain),
        "rss_mb": max(_number(part, "relay_rss_mib") for part in (drain, low, high, idle)),
        "idle_cpu": round((_number(idle, "cpu_s", "relay") + _postgres(idle)) / _number(idle, "seconds") * 100, 2),
        "p50_ms_at_5000": _number(high, "latency_ms", "p50"),
        "p99_ms_at_5000": _number(high, "latency_ms", "p99"),
        "cpu_s_per_million_at_1000": _cpu(low),
        "cpu_s_per_million_at_5000": _cpu(high),
        "drain_second_half_rows_s": _number(drain, "second_half_rows_per_s"),
        "drain_postgres_cpu_s_per_million": round(_postgres(drain) / _number(drain, "rows") * 1e6, 2),
        "start_to_first_s": _number(drain, "start_to_first_s"),
        "idle_cpu_process": _number(idle, "relay_percent_of_core"),
        "doubled": verdict["doubled"],
    }


_Part = dict[str, object]


def _number(part: _Part, *path: str) -> float:
    found: object = part
    for name in path:
        found = cast("_Part", found)[name]
    return float(cast("float", found))


def _postgres(part: _Part) -> float:
    """CPU seconds of Postgres for the relay: 0 where the server's processes are not on this machine."""
    return _number(part, "cpu_s", "postgres", "relay") if cast("_Part", part["cpu_s"])["postgres"] else 0.0


def _cpu(part: _Part) -> float:
    return round((_number(part, "cpu_s", "relay") + _postgres(part)) / _number(part, "rows") * 1e6, 2)


async def measure(stack: Stack, folder: Path, settings: Settings) -> dict[str, object]:
    """Both sides in turn and the medians of the turns: the result but for machine, date and command.

    With ``alone`` there is neither `peer` nor `ratio`, and without a harness only a backlog is drained. Raises
    `FileNotFoundError` if the harness is not there, `RuntimeError` if a relay stalls or loses or disorders a row.
    """
    found: dict[str, object] = {"name": "relay"}
    try:
        of = harness.load(settings.peer)
    except FileNotFoundError as missing:
        if not settings.alone:
            raise
        say(f"only a backlog is drained: {missing}")
        found["waybill"] = await _drain(stack, folder, settings.backlog)
    else:
        found |= await _sides(_Bench(stack, folder, of, settings), settings)
    if settings.deep:
        say(f"a backlog of {settings.deep:,} rows")
        found["deep"] = await _drain(stack, folder, settings.deep)
    return {**found, "settings": {**asdict(settings), "peer": settings.peer.name}}


async def _drain(stack: Stack, folder: Path, rows: int) -> Figures:
    relay = WaybillRelay(stack.postgres_url, stack.kafka, folder, Topics(f"{_PREFIX}-deep"))
    return await backlog.drain(relay, rows)


async def _sides(bench: _Bench, settings: Settings) -> dict[str, object]:
    ways: dict[str, Callable[[], Awaitable[Figures]]] = {"waybill": bench.waybill}
    if not settings.alone:
        ways |= {"peer": lambda: bench.peer({}), "peer_tuned": lambda: bench.peer(TUNED)}
    turns: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(settings.rounds):
        for name, way in ways.items():
            turns[name].append(await way())
            say(f"round {number + 1} of {settings.rounds}, {name}: {turns[name][-1]}")
    found = {name: medians(of) for name, of in turns.items()}
    ratios = (
        {}
        if settings.alone
        else {
            "ratio": ratio(_compared(found["waybill"]), found["peer"]),
            "ratio_tuned": ratio(_compared(found["waybill"]), found["peer_tuned"]),
        }
    )
    return {**found, **ratios, "turns": turns}


def _compared(of: Figures) -> Figures:
    return {name: of[name] for name in (*COMPARED, *FURTHER)}
