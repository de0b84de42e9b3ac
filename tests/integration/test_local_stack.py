"""The embedded stack: what survives a stop, a kill and a crash of its owner, and what a failed start says."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from redis.asyncio import Redis

from deploy.local import jars
from deploy.local.lock import Record, Records, StateInUseError, started
from deploy.local.process import StartError
from deploy.local.stack import STOP_ORDER, Stack
from tests.waiting import until

pytestmark = pytest.mark.long(60)

ROOT = Path(__file__).parents[2]

# Stands for `waybill up` in a terminal of its own.
OWNER = """
import json, pathlib, signal, sys
from deploy.local.stack import Stack
with Stack(pathlib.Path(sys.argv[1])) as stack:
    print(json.dumps({"pids": stack.pids, "ports": stack.ports}), flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests here: each start in it but the first resumes, in a third of the time."""
    return tmp_path_factory.mktemp("stack") / "state"


@dataclass
class Owner:
    """Another process that runs a stack."""

    process: subprocess.Popen[str]
    pids: dict[str, int]
    ports: dict[str, int]


@contextmanager
def owner_of(state: Path) -> Iterator[Owner]:
    command = [sys.executable, "-c", OWNER, str(state)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield Owner(process, **json.loads(process.stdout.readline()))
        finally:
            process.kill()


async def write(stack: Stack, key: str) -> None:
    """Put the key into all three stores, each time acknowledged."""
    postgres = await asyncpg.connect(stack.postgres_url)
    await postgres.execute("CREATE TABLE IF NOT EXISTS kept (key text)")
    await postgres.execute("INSERT INTO kept VALUES ($1)", key)
    await postgres.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=stack.kafka)
    await admin.start()
    await admin.create_topics([NewTopic(key, num_partitions=1, replication_factor=1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=stack.kafka, acks="all") as producer:
        await producer.send_and_wait(key, key.encode())
    async with Redis.from_url(stack.redis) as redis:
        await redis.set(key, key)


async def assert_kept(stack: Stack, key: str) -> None:
    postgres = await asyncpg.connect(stack.postgres_url)
    assert await postgres.fetchval("SELECT count(*) FROM kept WHERE key = $1", key) == 1
    await postgres.close()
    async with AIOKafkaConsumer(key, bootstrap_servers=stack.kafka, auto_offset_reset="earliest") as consumer:
        record = await asyncio.wait_for(consumer.getone(), 20)
    assert record.value == key.encode()
    async with Redis.from_url(stack.redis) as redis:
        assert await redis.get(key) == key.encode()


async def test_a_second_start_resumes_with_data_and_ports(state: Path) -> None:
    with Stack(state) as first:
        await write(first, "resumed")
        ports, pids = first.ports, first.pids
    assert all(started(pid) is None for pid in pids.values())
    with Stack(state) as second:
        assert second.ports == ports
        await assert_kept(second, "resumed")


def is_dead(stack: Stack, name: str) -> bool:
    return not stack.alive(name)


async def test_a_killed_server_starts_again_on_its_port_with_its_data(state: Path) -> None:
    with Stack(state) as stack:
        await write(stack, "restarted")
        before, ports = stack.pids, dict(stack.ports)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for name in STOP_ORDER:
            await until(partial(is_dead, stack, name), timeout=5, what=f"{name} is dead")
            await asyncio.to_thread(stack.restart, name)
            assert stack.alive(name)
        assert stack.ports == ports
        assert set(stack.pids.values()).isdisjoint(before.values())
        await assert_kept(stack, "restarted")


async def test_what_a_killed_owner_leaves_is_ended_and_its_data_kept(state: Path) -> None:
    with owner_of(state) as owner:
        connection = await asyncpg.connect(host="127.0.0.1", port=owner.ports["postgres"], user="waybill", ssl=False)
        await connection.execute("CREATE TABLE IF NOT EXISTS left_behind AS SELECT 1")
        owner.process.kill()
        owner.process.wait()
        assert all(started(pid) for pid in owner.pids.values())
        # The session stays open: what is left must end in spite of its clients.
        with Stack(state) as stack:
            assert all(started(pid) is None for pid in owner.pids.values())
            again = await asyncpg.connect(stack.postgres_url)
            assert await again.fetchval("SELECT count(*) FROM left_behind") == 1
            await again.close()
        connection.terminate()


async def test_ctrl_c_stops_all_in_order(state: Path) -> None:
    with owner_of(state) as owner:
        # To the whole group, as a terminal does it.
        os.killpg(owner.process.pid, signal.SIGINT)
        await until(lambda: owner.process.poll() is not None, timeout=30, what="the owner ends")
        assert all(started(pid) is None for pid in owner.pids.values())
    logs = [state / f"{name}.log" for name in STOP_ORDER]
    last_words = ("App info kafka.server for 1 unregistered", "ready to exit", "database system is shut down")
    for log, words in zip(logs, last_words, strict=True):
        assert words in log.read_text().splitlines()[-1]
    written = [log.stat().st_mtime_ns for log in logs]
    assert written == sorted(written)
    assert Records(state).read() == []


def test_a_folder_has_one_owner_at_a_time(state: Path) -> None:
    with Stack(state), pytest.raises(StateInUseError, match=f"in use by process {os.getpid()}"):
        Stack(state).__enter__()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("postgres", "could not bind IPv4 address"),
        ("redis", "Address already in use"),
        ("kafka", "Address already in use"),
    ],
)
def test_a_taken_port_fails_the_start_with_the_servers_own_words(state: Path, server: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stack = Stack(state, ports={server: stranger.getsockname()[1]})
        with pytest.raises(StartError, match=words) as failure:
            stack.__enter__()
    assert str(failure.value).startswith(f"{server} did not start: ended with status ")
    assert str(state / f"{server}.log") in str(failure.value)
    assert not any(stack.alive(name) for name in stack.pids)


def test_a_broken_setting_fails_the_start_with_the_servers_own_words(state: Path) -> None:
    with Stack(state):
        pass
    settings = state / "postgres" / "data" / "postgresql.conf"
    sound = settings.read_text()
    settings.write_text(sound + "\nmax_connections = 'many'\n")
    try:
        with pytest.raises(StartError, match='invalid value for parameter "max_connections"'):
            Stack(state).__enter__()
    finally:
        settings.write_text(sound)
    with Stack(state) as stack:
        assert all(stack.alive(name) for name in STOP_ORDER)


def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    records = Records(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        earlier = Record("kafka", stranger.pid, "another boot/1", signal.SIGTERM)
        records.write([earlier])
        assert records.end_leftovers() == []
        assert stranger.poll() is None
        stranger.kill()


class Repository:
    """In place of jgo's: every artifact is `content`, written where jgo would write it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.downloads = 0

    def __call__(self, *, repo_cache: Path, **_: object) -> Self:
        self.cached_path = repo_cache / "draft.jar"
        return self

    def project(self, *_: str) -> Self:
        return self

    at_version = artifact = project

    def resolve(self) -> Path:
        self.downloads += 1
        self.cached_path.write_bytes(self.content)
        return self.cached_path


@pytest.fixture
def one_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for a stack whose only jar is `sound`."""
    pins = tmp_path / "pins"
    pins.write_text(f"# comment\n{hashlib.sha256(b'sound').hexdigest()}  group:name:1\n")
    monkeypatch.setattr(jars, "PINS", pins)
    return tmp_path / "cache"


def test_a_damaged_jar_in_the_cache_is_fetched_again(one_pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(b"sound")
    monkeypatch.setattr(jars, "MavenContext", repository)
    (jar,) = jars.fetch(one_pin)
    assert jars.fetch(one_pin) == [jar]
    assert repository.downloads == 1
    jar.write_bytes(b"damaged")
    assert jars.fetch(one_pin) == [jar]
    assert jar.read_bytes() == b"sound"
    assert repository.downloads == 2


def test_a_jar_that_is_not_the_pinned_one_is_refused(one_pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "MavenContext", Repository(b"another"))
    with pytest.raises(jars.WrongJarError, match="group:name:1 has SHA-256"):
        jars.fetch(one_pin)
    assert not list(one_pin.rglob("*.jar"))
