"""The relay behind PgBouncer in transaction mode, as it may run: nothing of it lives in a session."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from deploy.local import ports
from deploy.local.account import unprivileged
from shared.kafka import Topics
from tests.databases import Database
from tests.history import nothing_parked, odd_row, read_history
from tests.relays import QUICK, Relays, Writer, drained, holders, relays
from tests.stack import Stores
from tests.waiting import until

pytest_plugins = ["tests.relay_fixtures"]

POOL_SIZE = 3
"""Connections to Postgres, for all relays together."""

PROGRAM = shutil.which("pgbouncer")

_CONFIG = """
[databases]
* = host={host} port={port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users.txt
pool_mode = transaction
max_prepared_statements = 100
default_pool_size = {size}
"""


def _version() -> tuple[int, ...]:
    told = subprocess.run([PROGRAM or "false", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


@pytest.fixture
def pooler(stores: Stores, database: Database) -> Iterator[int]:
    """Its port."""
    if PROGRAM is None:
        pytest.skip("there is no pgbouncer on this machine")
    if _version() < (1, 21):
        pytest.skip(f"pgbouncer {_version()} keeps no prepared statements in transaction mode; 1.21 does")
    server = urlsplit(database.owner_url)
    own_port = ports.free_port()
    with tempfile.TemporaryDirectory(prefix="waybill-pooler-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        config = folder / "pgbouncer.ini"
        config.write_text(
            _CONFIG.format(host=server.hostname, port=server.port, own_port=own_port, folder=folder, size=POOL_SIZE)
        )
        (folder / "users.txt").write_text('"waybill_relay" "waybill-tests"\n')
        # It refuses to run as root.
        account = unprivileged(folder, Path(PROGRAM))
        user, group = account.identity or (None, None)
        command = [*account.prefix, PROGRAM, str(config)]
        process = subprocess.Popen(command, user=user, group=group, stderr=subprocess.DEVNULL)
        try:
            yield own_port
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def pooled_fleet(
    database: Database, stores: Stores, relay_topics: Topics, pooler: int, tmp_path: Path
) -> Iterator[Relays]:
    """Starts relays that know the pooler's address alone."""
    direct = urlsplit(database.owner_url)
    before, _, _ = direct.netloc.rpartition("@")
    through = urlunsplit(direct._replace(netloc=f"{before}@127.0.0.1:{pooler}"))
    with relays(replace(database, owner_url=through), stores.kafka, relay_topics.prefix, tmp_path) as made:
        yield made


@pytest.mark.promise("I4", "I5")
async def test_all_of_a_relay_works_through_a_pooler(
    owner_db: asyncpg.Connection, stores: Stores, relay_topics: Topics, pooled_fleet: Relays
) -> None:
    """It shares, publishes, parks, buries, takes over and gives back, on fewer connections than it believes to have."""
    settings = {**QUICK, "WAYBILL_RELAY_MAX_ATTEMPTS": "2", "WAYBILL_RELAY_RETRY_DELAY_MS": "200"}
    ann, ben = pooled_fleet.start("ann", settings), pooled_fleet.start("ben", settings)
    await ann.ready()
    await ben.ready()

    async def shared() -> bool:
        return await holders(owner_db) == {"ann": 32, "ben": 32}

    await until(shared, timeout=30, what="an even share")
    writer = Writer(owner_db, range(100))
    for number in range(10):
        await writer.write(200)
        await odd_row(owner_db, writer, number)
    connections = (
        "SELECT count(*) FROM pg_stat_activity WHERE usename = 'waybill_relay' AND datname = current_database()"
    )
    assert 0 < await owner_db.fetchval(connections) <= POOL_SIZE
    ben.kill()

    async def taken_over() -> bool:
        return await holders(owner_db) == {"ann": 64}

    for _ in range(10):
        await writer.write(200)
    await until(taken_over, timeout=30, what="a take-over")
    await drained(owner_db, timeout=30)
    await until(lambda: nothing_parked(owner_db), timeout=30, what="the end of all queues")
    history = await read_history(owner_db, stores.kafka, relay_topics.prefix)
    history.hold()
    assert len(history.dead) == 10
    ann.process.terminate()
    assert await ann.ended() == 0
    assert await holders(owner_db) == {None: 64}
