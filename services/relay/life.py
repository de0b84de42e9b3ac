"""Which life of which store the positions of this process are of.

After a failover to a standby that lacked the last commits, or after a restore, cursors stand lower than this process
remembers, and ids above them are drawn again, for other rows. So whatever rests on what is remembered (a renewal, a
move of a cursor, a read past a position) asks in its statement for the life that is known here, and does nothing in
another one. Who holds the leases notices, and begins anew with what the store has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool, PooledConnection

_NOW = statements(__file__)["now"]


class Life:
    """Shared by all who ask. Raises what asyncpg raises, and `ConnectionError` where the server is a standby."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: str | None = None

    async def now(self, connection: PooledConnection | None = None) -> str:
        """Of the store as it is, by this connection, or by one of the pool's."""
        life: str | None = await (connection or self._pool).fetchval(_NOW)
        if life is None:
            raise ConnectionError("the store is a standby")
        return life

    async def known(self, connection: PooledConnection | None = None) -> str:
        """The one that positions are of; before any was adopted, that of the store as it is."""
        if self._known is None:
            self._known = await self.now(connection)
        return self._known

    def adopt(self, life: str) -> None:
        """From now on positions are of this life: every shard was taken anew in it."""
        self._known = life
