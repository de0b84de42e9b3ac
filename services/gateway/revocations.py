"""Tokens that are void before they end. The truth is a row in Postgres; whoever looks later finds it all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.auth import Claims
    from shared.postgres import Pool, Record

_SQL = statements(__file__)
_NEWEST = _SQL["newest"]
_OF_USER = _SQL["of_user"]
_TIMEOUT_S = 5.0


class Revocation(NamedTuple):
    """``jti``: one token is void. Else all of the user, or of one ``device_id``, that were issued before ``before``.

    ``before``: seconds since the epoch.
    """

    id: int
    user_id: str
    device_id: str | None
    jti: str | None
    before: float


def is_revoked(claims: Claims, device_id: str, rows: Iterable[Revocation]) -> bool:
    """Whether one of the rows makes the token void on this device. `open_sessions` in SQL has the same rule.

    A token that does not say when it was issued is void by every row of its user that names a time.
    """
    return any(_voids(row, claims, device_id) for row in rows)


def _voids(row: Revocation, claims: Claims, device_id: str) -> bool:
    if row.user_id != claims.subject:
        return False
    if row.jti is not None:
        return row.jti == claims.token_id
    return row.device_id in (None, device_id) and (claims.issued_at is None or claims.issued_at < row.before)


async def newest_revocations(pool: Pool, within_s: float) -> list[Revocation]:
    """The rows that were made within so many seconds, by Postgres' clock. Raises `UnavailableError`.

    They are committed in another order than their ids and times say: look back further than the last look, by longer
    than a transaction may last. To meet a row again is harmless.
    """
    with unavailable_if_away():
        return [revocation(row) for row in await pool.fetch(_NEWEST, within_s)]


async def revocations_of(pool: Pool, user_id: str) -> list[Revocation]:
    """Every row of a user. Raises `UnavailableError`."""
    with unavailable_if_away():
        return [revocation(row) for row in await pool.fetch(_OF_USER, user_id, timeout=_TIMEOUT_S)]


def revocation(row: Record) -> Revocation:
    """A row that has columns of these names."""
    return Revocation(row["id"], row["user_id"], row["device_id"], row["jti"], row["before"])
