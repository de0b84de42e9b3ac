"""A long backlog drained by Waybill's relay alone: how fast, and is its memory flat however long the backlog is?"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from uuid import NAMESPACE_OID, uuid5

import asyncpg

from bench.stage import say
from shared.kafka import partition_of, partitions, reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokafka import AIOKafkaConsumer

    from bench.figures import Figures
    from bench.outbox import WaybillRelay

_CONVERSATIONS = 1_000
_CHUNK = 50_000
_LOOK_EVERY_S = 0.25
_STALLED_S = 60.0
_TIMEOUT_S = 120.0


async def drain(relay: WaybillRelay, rows: int) -> Figures:
    """Fill the outbox, then let the relay drain it: rows per second, and its memory over time.

    `rss_first_mb` and `rss_last_mb` are the medians of the first and the last quarter of the time: equal if the memory
    is flat. The time is from the first row that is seen sent to the last one. Raises `RuntimeError` if it stalls.
    """
    await relay.make()
    watcher = reader(relay.bootstrap, client_id="bench")
    await watcher.start()
    try:
        db = await asyncpg.connect(relay.url, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
        try:
            await relay.prepare(db)
            await _fill(relay, db, rows)
        finally:
            await db.close(timeout=_TIMEOUT_S)
        mark = await _end(watcher, relay)
        relay.start()
        try:
            return await _watch(relay, watcher, mark, rows)
        finally:
            await asyncio.to_thread(relay.stop)
    finally:
        await watcher.stop()
        await relay.drop()


async def _fill(relay: WaybillRelay, db: asyncpg.Connection, rows: int) -> None:
    names = [uuid5(NAMESPACE_OID, f"bench-{number}") for number in range(_CONVERSATIONS)]
    shards = [partition_of(str(name)) for name in names]
    for begin in range(0, rows, _CHUNK):
        await relay.fill(db, shards, names, begin, min(rows, begin + _CHUNK) - 1)
    await db.execute("VACUUM ANALYZE outbox", timeout=_TIMEOUT_S)
    say(f"{rows:,} rows are written")


async def _end(watcher: AIOKafkaConsumer, relay: WaybillRelay) -> int:
    return sum((await watcher.end_offsets(partitions([relay.topics.events]))).values())


async def _watch(relay: WaybillRelay, watcher: AIOKafkaConsumer, mark: int, rows: int) -> Figures:
    (pid,) = relay.pids()
    status = Path(f"/proc/{pid}/status")
    counts: list[tuple[float, int]] = []
    memory: list[float] = []
    changed = time.monotonic()
    while not counts or counts[-1][1] < rows:
        now, done = time.monotonic(), await _end(watcher, relay) - mark
        if done != (counts[-1][1] if counts else 0):
            changed = now
            counts.append((now, done))
        elif now - changed > _STALLED_S:
            raise RuntimeError(f"Waybill stalled at row {done} of {rows}\n{relay.why_stalled()}")
        if counts:
            memory.append(rss_mb(status.read_text(encoding="ascii")))  # noqa: ASYNC240 - no disk
        await asyncio.sleep(_LOOK_EVERY_S)
    (first_at, first), (last_at, last) = counts[0], counts[-1]
    rate = (last - first) / (last_at - first_at) if last_at > first_at else float(rows)
    return {"rows": rows, "drain_rows_s": round(rate, 1), **over_time(memory)}


def over_time(memory: Sequence[float]) -> Figures:
    """What the memory did over time, in MiB. Needs one value at least."""
    quarter = max(1, len(memory) // 4)
    return {
        "rss_first_mb": round(median(memory[:quarter]), 1),
        "rss_last_mb": round(median(memory[-quarter:]), 1),
        "rss_mb": round(max(memory), 1),
    }


def rss_mb(status: str) -> float:
    """Resident memory in MiB from the text of `/proc/PID/status`. Raises `ValueError` if it says nothing of it."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return round(int(value.split()[0]) / 1024, 1)
    raise ValueError("the process has ended")
