"""A prepared topic of acks, drained by Waybill's receipts process, or by the reference, on a database of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from bench.acks import by_partition, ids
from bench.processes import cpu_s, descendants, rss_kib
from bench.reference import plain_acks
from bench.stage import make_topics, say
from deploy.local.ports import free_port
from deploy.migrate import migrate_async, url_of_role
from shared.kafka import MAX_RECORD_BYTES, Topics, partition_of, producer
from shared.statements import statements

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from bench.acks import Ack, Acks, Mix
    from bench.figures import Figures
    from deploy.local.stack import Stack

_SQL = statements(__file__)

SETTINGS = "WAYBILL_RECEIPTS_"
"""Of settings that may be given to the receipts process from outside."""

_DATABASE = "waybill_bench_receipts"
_LOOK_EVERY_S = 0.05
_STALLED_S = 60.0
_STOP_S = 20.0
_TIMEOUT_S = 120.0
_READY_S = 30.0
_TAIL = 2_000


class Bench:
    """The drains of one mix. ``profiles``: a folder for profiles of Waybill's process; without it no profiler runs."""

    def __init__(self, stack: Stack, folder: Path, mix: Mix, given: Acks, profiles: Path | None = None) -> None:
        self._stack = stack
        self._log = folder / "receipts.log"
        self._mix = mix
        self._given = given
        self._profiles = profiles
        self._topics = Topics(f"bench-receipts-{mix.name}")
        self._turn = 0
        self._server = stack.postgres_url
        self._url = urlunsplit(urlsplit(self._server)._replace(path=f"/{_DATABASE}"))

    async def prepare(self) -> None:
        """Write the topic."""
        await make_topics(self._stack.kafka, self._topics)
        await write_topic(self._stack.kafka, self._topics.acks, self._given.acks)
        say(f"{self._mix.name}: {len(self._given.acks):,} acks of {self._mix.devices:,} devices are in Kafka")

    async def waybill(self) -> Figures:
        """Drain all of it. Raises `RuntimeError` if it stalls, or if what it has written is not all."""
        async with self._database(), self._connection() as db:
            await migrate_async(self._url)
            await self._fill(db)
            self._turn += 1
            acks = len(self._given.acks)
            async with self._receipts() as process:
                meter = await self._meter(db, process)
                watched = _Watched(acks, meter, self._why_stalled)
                while not watched.full:
                    await asyncio.sleep(_LOOK_EVERY_S)
                    watched.see(await db.fetchval(_SQL["done"], self._topics.acks))
                found = watched.figures()
            written = await db.fetchrow(_SQL["written"])
            assert written is not None
            if written["devices"] < 1 or written["delivered"] < 1:
                raise RuntimeError("nothing was written")
            return found | {f"rows_{name}": float(count) for name, count in written.items()}

    async def peer(self, *, seconds: float, connections: int) -> Figures:
        """Let the reference drain for so many seconds, which is far from all of it. Raises `RuntimeError`."""
        async with self._database(), self._connection() as db:
            await plain_acks.make(self._url)
            self._turn += 1
            options = ["--topic", self._topics.acks, "--group", f"bench-plain-{self._mix.name}-{self._turn}"]
            options += ["--postgres", self._url, "--kafka", self._stack.kafka, "--connections", str(connections)]
            async with plain(options, self._log) as process:
                watched = _Watched(len(self._given.acks), await self._meter(db, process), self._why_stalled)
                assert process.stdout is not None
                until = float("inf")
                while not watched.full and time.monotonic() < until:
                    line = await asyncio.wait_for(process.stdout.readline(), _STALLED_S)
                    if not line:
                        raise RuntimeError(f"the reference ended\n{self._why_stalled()}")
                    watched.see(int(line))
                    if watched.begun and until == float("inf"):
                        until = time.monotonic() + seconds
                return watched.figures()

    async def _fill(self, db: asyncpg.Connection) -> None:
        names = ids(self._mix)
        shards = [partition_of(str(name)) for name in names]
        await db.execute(_SQL["fill"], names, shards, self._given.heads, self._mix.members, timeout=_TIMEOUT_S)
        await db.execute("VACUUM ANALYZE conversation, member", timeout=_TIMEOUT_S)
        await db.execute("CHECKPOINT", timeout=_TIMEOUT_S)

    async def _meter(self, db: asyncpg.Connection, process: Process) -> _Meter:
        own = await db.fetchval("SELECT pg_backend_pid()")
        return _Meter(process.pid, self._stack.pids["postgres"], own)

    @contextlib.asynccontextmanager
    async def _database(self) -> AsyncIterator[None]:
        async with self._connection(self._server) as db:
            await db.execute(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", timeout=_TIMEOUT_S)
            await db.execute(f"CREATE DATABASE {_DATABASE}", timeout=_TIMEOUT_S)
        try:
            yield
        finally:
            async with self._connection(self._server) as db:
                await db.execute(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", timeout=_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _connection(self, url: str | None = None) -> AsyncIterator[asyncpg.Connection]:
        db = await asyncpg.connect(url or self._url, timeout=_TIMEOUT_S, command_timeout=_TIMEOUT_S)
        try:
            yield db
        finally:
            await db.close(timeout=_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _receipts(self) -> AsyncIterator[Process]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")},
            **given(os.environ),
            "WAYBILL_POSTGRES_URL": url_of_role(self._url, "receipts"),
            "WAYBILL_KAFKA_BOOTSTRAP": self._stack.kafka,
            "WAYBILL_TOPIC_PREFIX": self._topics.prefix,
            "WAYBILL_RECEIPTS_PRIVATE_PORT": str(free_port()),
        }
        program = ["services.receipts.main"]
        if self._profiles is not None:
            file = self._profiles.absolute() / f"receipts-{self._mix.name}-{self._turn}"
            program = ["bench.profiled", str(file), "services.receipts.main"]
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", *program, env=environment, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            await stop(process)

    def _why_stalled(self) -> str:
        return tail(self._log)


class _Meter:
    """CPU of the process, and of Postgres without the connection that watches."""

    def __init__(self, process: int, postgres: int, own: int) -> None:
        self._process = process
        self._postgres = postgres
        self._own = own

    def now(self) -> tuple[float, float]:
        """Seconds so far of both."""
        return cpu_s(self._process), sum(cpu_s(pid) for pid in descendants(self._postgres) if pid != self._own)

    def rss_mb(self) -> float:
        """Memory of the process."""
        return rss_kib(self._process) / 1024


class _Watched:
    """Counts against time, from the first acks that are seen written on: what comes before is the start."""

    def __init__(self, all_: int, meter: _Meter, why_stalled: Callable[[], str]) -> None:
        self._all = all_
        self._meter = meter
        self._why = why_stalled
        self._points: list[tuple[float, int]] = []
        self._changed = time.monotonic()
        self._used = (0.0, 0.0)

    @property
    def begun(self) -> bool:
        """Whether some are written."""
        return bool(self._points)

    @property
    def full(self) -> bool:
        """Whether all are."""
        return self.begun and self._points[-1][1] >= self._all

    def see(self, done: int) -> None:
        """So many are written now."""
        now = time.monotonic()
        if done > (self._points[-1][1] if self._points else 0):
            if not self._points:
                self._used = self._meter.now()
            self._points.append((now, done))
            self._changed = now
        elif now - self._changed > _STALLED_S:
            raise RuntimeError(f"stalled at {done} of {self._all} acks\n{self._why()}")

    def figures(self) -> Figures:
        """What it comes to; CPU by 1 M acks."""
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        process, postgres = (now - before for now, before in zip(self._meter.now(), self._used, strict=True))
        acks = last - first
        if acks < 1:
            raise RuntimeError("too few acks to measure a rate")
        return {
            "rate_s": round(acks / (last_at - first_at), 1),
            "cpu_s_per_million": round((process + postgres) / acks * 1e6, 2),
            "postgres_cpu_s_per_million": round(postgres / acks * 1e6, 2),
            "rss_mb": round(self._meter.rss_mb(), 1),
            "acks": float(acks),
        }


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """The receipts service's settings in an environment."""
    return {name: value for name, value in environment.items() if name.startswith(SETTINGS)}


@contextlib.asynccontextmanager
async def plain(options: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """The reference at work while the block runs; its standard output tells how many acks are committed."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "bench.reference.plain_acks",
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        if (await asyncio.wait_for(process.stdout.readline(), _READY_S)).strip() != b"ready":
            raise RuntimeError(f"the reference did not start\n{tail(log)}")
        yield process
    finally:
        await stop(process)


async def stop(process: Process) -> None:
    """Ask a process to end, wait, and kill it if it does not."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def write_topic(bootstrap: str, topic: str, given: Sequence[Ack]) -> None:
    """Write acks to a topic, each partition's in order; returns once Kafka has them."""
    made = producer(bootstrap, client_id="bench")
    await made.start()
    try:
        for partition, some in by_partition(given).items():
            batch, size = made.create_batch(), 0
            for ack in some:
                size += len(ack.key) + len(ack.value) + 32
                if size > MAX_RECORD_BYTES // 2 or batch.append(key=ack.key, value=ack.value, timestamp=None) is None:
                    await (await made.send_batch(batch, topic, partition=partition))
                    batch, size = made.create_batch(), len(ack.key) + len(ack.value) + 32
                    batch.append(key=ack.key, value=ack.value, timestamp=None)
            await (await made.send_batch(batch, topic, partition=partition))
    finally:
        await made.stop()
