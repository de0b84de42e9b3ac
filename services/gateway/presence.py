"""Who is connected where, in Redis. It may vanish at any time: nothing on the message path asks for it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable

_LOOP = LOOP_ERRORS.labels("presence")
_ANSWER_S = 2.0


class Presence:
    """Keeps `PREFIX:sessions:USER`: a sorted set of `GATEWAY/SESSION`, scored by its end in s since the epoch."""

    def __init__(self, url: str, *, prefix: str, gateway: str, refresh_s: float) -> None:
        self._redis: Redis = Redis.from_url(url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)
        self._prefix = prefix
        self._gateway = gateway
        self._refresh_s = refresh_s
        self._here: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._changed = asyncio.Event()

    def opened(self, session_id: str, user_id: str) -> None:
        """A session is here."""
        self._here[session_id] = user_id
        self._changed.set()

    def closed(self, session_id: str) -> None:
        """A session has ended."""
        user_id = self._here.pop(session_id, None)
        if user_id is not None:
            self._gone[session_id] = user_id
            self._changed.set()

    async def run(self) -> None:
        """Tell Redis of changes at once and of all sessions every ``refresh_s`` seconds, until cancelled."""
        told: set[str] = set()
        refreshed = float("-inf")
        try:
            while True:
                if time.monotonic() - refreshed >= self._refresh_s:
                    told, refreshed = set(), time.monotonic()
                gone, self._gone = self._gone, {}
                self._changed.clear()
                try:
                    await self._tell({k: v for k, v in self._here.items() if k not in told}, gone)
                    told = set(self._here)
                except (RedisError, OSError, TimeoutError) as error:
                    _LOOP.inc()
                    logger(__name__).warning("presence is not told: Redis is away", error=type(error).__name__)
                    told = set()
                    await asyncio.sleep(1.0)
                try:
                    async with asyncio.timeout(self._refresh_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            await self._redis.aclose()

    async def ping(self) -> str | None:
        """None if Redis answers, else what is wrong."""
        try:
            answer: Awaitable[bool] = self._redis.ping()
            await answer
        except (RedisError, OSError, TimeoutError) as error:
            return type(error).__name__
        return None

    async def _tell(self, here: dict[str, str], gone: dict[str, str]) -> None:
        if not here and not gone:
            return
        now = time.time()
        until = now + 2 * self._refresh_s
        async with self._redis.pipeline(transaction=False) as pipe:
            for session_id, user_id in gone.items():
                pipe.zrem(self._key(user_id), f"{self._gateway}/{session_id}")
            for session_id, user_id in here.items():
                key = self._key(user_id)
                pipe.zremrangebyscore(key, "-inf", now)
                pipe.zadd(key, {f"{self._gateway}/{session_id}": until})
                pipe.expire(key, int(2 * self._refresh_s) + 1)
            await pipe.execute()

    def _key(self, user_id: str) -> str:
        return f"{self._prefix}:sessions:{user_id}"
