"""What services tell each other through Redis, to be noticed sooner. A hint may be lost: the truth is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Revocation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a user that were just revoked: the one with this ``jti``; else those issued before a time.

    ``device_id``: of this device alone, None is all of them. ``before``: seconds since the epoch. The row in Postgres
    counts, this only says that there is one.
    """

    user_id: str
    device_id: str | None = None
    jti: str | None = None
    before: float


_DECODER = msgspec.json.Decoder(Revocation)


def revocations_channel(prefix: str) -> str:
    """The channel of revocations. ``prefix``: as that of the topics."""
    return f"{prefix}:revocations"


def encode(hint: Revocation) -> bytes:
    """The message of a hint."""
    return msgspec.json.encode(hint)


def decode(message: bytes) -> Revocation:
    """The hint of a message. Raises `msgspec.MsgspecError`."""
    return _DECODER.decode(message)


async def announce_revocation(redis: Redis, prefix: str, hint: Revocation) -> int:
    """Tell all gateways; returns how many heard it. Raises `redis.exceptions.RedisError` or `OSError`."""
    heard: int = await redis.publish(revocations_channel(prefix), encode(hint))
    return heard
