"""`waybill revoke`: tokens become void before they end."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from deploy.local import endpoints
from services.console.settings import CommandSettings
from services.console.terminal import DEFAULT_STATE, AsJson, StateFolder, print_json, run, show
from shared import hints
from shared.auth import MAX_TOKEN_ID
from shared.clock import wire_time
from shared.contracts.words import is_name
from shared.errors import BadRequestError
from shared.postgres import unavailable_if_away
from shared.settings import load
from shared.statements import statements

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from shared.postgres import Pool

_REVOKE = statements(__file__)["revoke"]

_TIMEOUT_S = 5.0
_MAX_REASON = 1000


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    """What is void now: the token with this ``jti``; else those of the user, or of one device, issued before a time.

    ``told``: how many gateways' processes were told at once; null: none could be. Each finds it by itself soon.
    """

    id: int
    user_id: str
    device_id: str | None
    jti: str | None
    before: str
    told: int | None = None


def revoke(
    user: Annotated[str, typer.Argument(help="The user id.")],
    *,
    device: Annotated[str | None, typer.Option(help="Only tokens of sessions on this device.")] = None,
    token: Annotated[str | None, typer.Option(metavar="JTI", help="Only the token with this `jti`.")] = None,
    reason: Annotated[str | None, typer.Option(help="Why; it is kept.")] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Forget it after so many seconds: no such token lives longer. Default: never."),
    ] = None,
    as_json: AsJson = False,
    state: StateFolder = DEFAULT_STATE,
) -> None:
    """Make a user's tokens void that were issued up to now, and end the sessions that were opened with them.

    Gateways find it in Postgres within seconds, or are told through Redis at once if WAYBILL_REDIS_URL, or the state
    folder of a running `waybill up`, says where it is.
    """
    if device is not None and token is not None:
        raise typer.BadParameter("name a device or a token")

    async def work(pool: Pool) -> Revoked:
        row, before = await write(pool, user, device_id=device, jti=token, reason=reason, keep_s=keep)
        return msgspec.structs.replace(row, told=await _tell(row, before, state))

    done = run(state, work)
    if as_json:
        print_json(done)
        return
    what = f"the token {token}" if token else f"tokens issued before {done.before}"
    show(f"{user}{f' on {device}' if device else ''}: {what} {'is' if token else 'are'} void")


async def write(
    pool: Pool,
    user_id: str,
    *,
    device_id: str | None = None,
    jti: str | None = None,
    reason: str | None = None,
    keep_s: int | None = None,
) -> tuple[Revoked, datetime]:
    """Write the row. Raises `BadRequestError` with the field, `UnavailableError`."""
    for field, name in (("user", user_id), ("device", device_id)):
        if name is not None and not is_name(name):
            raise BadRequestError("expected 1 to 64 characters of A–Z a–z 0–9 . _ : @ -", field=field)
    for field, text, most in (("token", jti, MAX_TOKEN_ID), ("reason", reason, _MAX_REASON)):
        if text is not None and (not 1 <= len(text) <= most or "\0" in text):
            raise BadRequestError(f"expected 1 to {most} characters", field=field)
    with unavailable_if_away():
        row = await pool.fetchrow(_REVOKE, user_id, device_id, jti, reason, keep_s, timeout=_TIMEOUT_S)
    assert row is not None
    before: datetime = row["before"]
    return Revoked(id=row["id"], user_id=user_id, device_id=device_id, jti=jti, before=wire_time(before)), before


async def _tell(row: Revoked, before: datetime, state: Path) -> int | None:
    settings = load(CommandSettings)
    url = str(settings.redis_url) if settings.redis_url else None
    if url is None and settings.postgres_url is None:
        try:
            url = endpoints.read(state / endpoints.FILE).redis
        except (OSError, ValueError):
            return None
    if url is None:
        return None
    hint = hints.Revocation(user_id=row.user_id, device_id=row.device_id, jti=row.jti, before=before.timestamp())
    redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await hints.announce_revocation(redis, settings.topic_prefix, hint)
    except (RedisError, OSError, TimeoutError) as error:
        print(f"waybill: gateways were not told, they find it themselves: {error}", file=sys.stderr)
        return None
    finally:
        await redis.aclose()
