"""A fresh, migrated database for each test, copied from one that was migrated once."""

import asyncio
import secrets
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from deploy.migrate import migrate

T = TypeVar("T")

ROLE_PASSWORD = "waybill-tests"
"""Of every service's role. Roles belong to the whole server, so all runs on one server agree on it."""

ROLE_PREFIX = "waybill_"


@dataclass(frozen=True, slots=True)
class Database:
    """A database of its own."""

    name: str
    owner_url: str

    def url(self, role: str) -> str:
        """The address for a service's role, with or without `ROLE_PREFIX`: `relay` is `waybill_relay`."""
        full = ROLE_PREFIX + role.removeprefix(ROLE_PREFIX)
        return _changed(self.owner_url, user=f"{full}:{quote(ROLE_PASSWORD)}")


class Databases:
    """Makes databases on one server. The first one migrates a template; each is then a copy, in some 50 ms."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._template: str | None = None

    def create(self) -> Database:
        if self._template is None:
            template = f"waybill_template_{secrets.token_hex(4)}"
            self._execute(f"CREATE DATABASE {template}")
            self._template = template
            migrate(_changed(self._server_url, database=template), role_password=ROLE_PASSWORD)
        name = f"waybill_{secrets.token_hex(6)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {self._template}")
        return Database(name, _changed(self._server_url, database=name))

    def drop(self, database: Database) -> None:
        """Drop it, with every session that is still in it."""
        self._execute(f"DROP DATABASE IF EXISTS {database.name} WITH (FORCE)")

    def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            self._execute(f"DROP DATABASE IF EXISTS {self._template} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        run(_execute(self._server_url, statement))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from a fixture that is not one, in a loop of its own that leaves the test's loop alone."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _changed(url: str, *, user: str | None = None, database: str | None = None) -> str:
    parts = urlsplit(url)
    before, _, host = parts.netloc.rpartition("@")
    path = f"/{database}" if database else parts.path
    return urlunsplit(parts._replace(netloc=f"{user or before}@{host}", path=path))


async def fill(database: Database, statements: str) -> None:
    """Run statements one by one, as its owner; none of them has to survive a crash."""
    connection = await asyncpg.connect(database.owner_url)
    try:
        await connection.execute("SET synchronous_commit = off")
        for statement in statements.split(";\n"):
            if statement.strip():
                await connection.execute(statement)
    finally:
        await connection.close()
