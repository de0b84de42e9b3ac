"""Waybill's relay as the harness of relays drives it: a process of its own on a database and topics of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg

from deploy.local.ports import free_port
from deploy.migrate import migrate_async, url_of_role
from shared.kafka import Topics, ensure_topics, partition_of
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness import Row

_SQL = statements(__file__)

_DATABASE = "waybill_bench_relay"
_TIMEOUT_S = 60.0
_STOP_S = 30.0
_TAIL = 2_000


class WaybillRelay:
    """Has the methods of `bench.harness.Relay`. ``server`` is an owner's address on the Postgres to measure on."""

    name = "Waybill"

    def __init__(self, server: str, bootstrap: str, folder: Path, topics: Topics) -> None:
        self.url = urlunsplit(urlsplit(server)._replace(path=f"/{_DATABASE}"))
        self.topics = topics
        self.settings: dict[str, object] = {"WAYBILL_TOPIC_PREFIX": topics.prefix}
        self._server = server
        self.bootstrap = bootstrap
        self._log = folder / "relay.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def make(self) -> None:
        """A migrated, empty database. Raises `MigrationError` and what asyncpg raises."""
        await self.drop()
        await migrate_async(self.url)

    async def drop(self) -> None:
        """Remove the database."""
        connection = await asyncpg.connect(self._server, timeout=_TIMEOUT_S)
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", timeout=_TIMEOUT_S)
        finally:
            await connection.close(timeout=_TIMEOUT_S)

    async def prepare(self, db: asyncpg.Connection) -> None:
        """Make what rows are written with, and the topics that are missing."""
        await db.execute(_SQL["writer"])
        await ensure_topics(self.bootstrap, self.topics)

    async def insert(self, db: asyncpg.Connection, rows: Sequence[Row]) -> None:
        """One committed transaction of rows."""
        await db.execute(
            _SQL["write"],
            [_shard_of(row.conversation) for row in rows],
            [UUID(row.conversation) for row in rows],
            [row.seq for row in rows],
            [row.id for row in rows],
            [row.payload.encode() for row in rows],
        )

    async def fill(
        self, db: asyncpg.Connection, shards: Sequence[int], conversations: Sequence[UUID], first: int, last: int
    ) -> None:
        """Rows of a backlog, from number ``first`` to ``last``, over all ``conversations`` in turn."""
        await db.execute(_SQL["fill"], shards, conversations, first, last, timeout=_TIMEOUT_S)

    def start(self) -> None:
        """Start the process; it takes its shards within a second."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")},
            "WAYBILL_POSTGRES_URL": url_of_role(self.url, "relay"),
            "WAYBILL_KAFKA_BOOTSTRAP": self.bootstrap,
            "WAYBILL_TOPIC_PREFIX": self.topics.prefix,
            "WAYBILL_RELAY_PRIVATE_PORT": str(free_port()),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.relay.main"], env=environment, stdout=log, stderr=log
            )

    def stop(self) -> None:
        """Ask it to end, wait, and kill it if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pids(self) -> list[int]:
        """The process, while it is started."""
        return [] if self._process is None else [self._process.pid]

    def why_stalled(self) -> str:
        """The end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in which the servers' own account may read."""
    made = tempfile.TemporaryDirectory(prefix="waybill-bench-")
    Path(made.name).chmod(0o755)
    return made


@lru_cache(maxsize=10_000)
def _shard_of(conversation: str) -> int:
    return partition_of(conversation)
