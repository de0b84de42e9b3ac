"""The pool to Postgres. Statements are named (`shared.statements`) and parameterised; each stands by itself.

Works through a pooler in transaction mode that keeps prepared statements (PgBouncer from 1.21 on): nothing is set on a
session, so nothing is reset when a connection goes back to the pool.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import asyncpg

from shared.errors import UnavailableError
from shared.ranges import OPEN, RangeSet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

RETRIABLE: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.TransactionTimeoutError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InternalClientError,
)
"""What passes by itself: the server is away, restarting or full, or somebody held a lock for too long.

The last one is asyncpg's word for a statement on a connection that the server is just closing ("another operation is in
progress": the farewell).
"""

OF_A_ROW = ("22", "23", "54")
"""Classes of SQLSTATE that blame what is written, not the server: data, integrity, size."""

_CLOSE_S = 5.0


Record = asyncpg.Record
if TYPE_CHECKING:
    Pool = asyncpg.Pool[Record]
    PooledConnection = asyncpg.pool.PoolConnectionProxy[Record]
    _Base = asyncpg.Connection[Record]
else:
    Pool = asyncpg.Pool
    PooledConnection = asyncpg.pool.PoolConnectionProxy
    _Base = asyncpg.Connection


class _Connection(_Base):
    def get_reset_query(self) -> str:
        return ""


@asynccontextmanager
async def open_pool(url: str, *, size: int, name: str, timeout_s: float = 10.0) -> AsyncIterator[Pool]:
    """A pool of at most ``size`` connections, each opened when it is first needed.

    ``name`` is what `pg_stat_activity` shows. ``timeout_s`` bounds each statement and each attempt to connect. Postgres
    may be away when the pool opens: then the first statement fails, not the start.
    """
    pool = asyncpg.create_pool(
        url,
        min_size=0,
        max_size=size,
        timeout=timeout_s,
        command_timeout=timeout_s,
        connection_class=_Connection,
        server_settings={"application_name": name},
    )
    await pool
    try:
        yield pool
    finally:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await pool.close()
        except TimeoutError:
            pool.terminate()


@contextmanager
def unavailable_if_away() -> Iterator[None]:
    """Turn what passes by itself (`RETRIABLE`) into `UnavailableError`, so that a client tries again."""
    try:
        yield
    except RETRIABLE as error:
        raise UnavailableError("the store is away", retry_after_ms=1000) from error


def from_multirange(value: Iterable[asyncpg.Range[int]]) -> RangeSet:
    """An ``int8multirange`` as asyncpg reads it (canonical: lower end in, upper end out)."""
    return RangeSet((r.lower or 0, OPEN if r.upper is None else r.upper - 1) for r in value if not r.isempty)


def to_array(numbers: Iterable[int]) -> str:
    """The text of an array of numbers, for a parameter that the statement casts.

    For hot paths: asyncpg's own encoding asks of every element whether it is iterable.
    """
    return "{" + ",".join(map(str, numbers)) + "}"


def to_multirange(ranges: RangeSet) -> str:
    """The text of an ``int8multirange``, for a parameter that the statement casts."""
    return "{" + ",".join(f"[{low},{'' if high == OPEN else high + 1})" for low, high in ranges) + "}"
