"""The one way to Redis. Nothing on the message path waits for it, and it comes back by itself.

Redis holds only what may vanish. So whoever uses it has two duties: to do without it while it is away, and to tell
everything again when it is *renewed*: reached again, or found emptied.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.gateway.metrics import REDIS_BAD_MESSAGES, REDIS_OUTAGES, REDIS_UP
from shared.clock import Backoff
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from redis.asyncio.client import PubSub
    from redis.commands.core import AsyncScript
    from redis.typing import EncodableT

_LOOP = LOOP_ERRORS.labels("redis")
_FAULTS = (RedisError, OSError, TimeoutError)
_GONE = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError)
"""Errors after which the connection is no good, whatever was asked."""

_MOST_CONNECTIONS = 16
_STABLE_S = 5.0
"""After so long, the next outage begins with short delays again."""


class AwayError(Exception):
    """Redis did not do it. Whether it was reached is not known; it was counted and logged."""


class Link:
    """Commands, scripts and a subscription, to one Redis (a cluster is none: scripts touch keys of many slots).

    ``prefix`` keeps keys and channels apart from those of others. ``answer_s``: how long anything may take. ``beat_s``:
    how often it is looked whether Redis is there, takes writes and still is the same store. ``probe_s``: how often the
    way from a publisher to the subscription is tried.
    """

    def __init__(
        self, url: str, *, prefix: str, answer_s: float = 2.0, beat_s: float = 0.25, probe_s: float = 5.0
    ) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            protocol=2,
            # Each use has a time-out of its own around it. With one here the client waits by `asyncio.wait_for`, which
            # before Python 3.12 may swallow a cancellation (seen: a gateway that did not end), and makes a task of
            # every command.
            socket_timeout=None,
            socket_connect_timeout=answer_s,
            max_connections=_MOST_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
        )
        self.origin = secrets.token_hex(8)
        """Names this link in what it publishes, so that it knows its own."""
        self.epoch_key = f"{prefix}:epoch"
        self._answer_s = answer_s
        self._beat_s = beat_s
        self._probe_s = probe_s
        self._beat_script = self.script(__file__)
        self._echo = f"{prefix}:link:{self.origin}"
        self._channels: dict[bytes, Callable[[bytes], None]] = {self._echo.encode(): self._echoed}
        self._renewals: list[Callable[[], None]] = []
        self._losses: list[Callable[[], None]] = []
        self._up = asyncio.Event()
        self._fault: BaseException | None = None
        self._away_since: float | None = None
        self._epoch: bytes | None = None
        self._last_echo = 0.0
        self._complaints: set[str] = set()
        REDIS_UP.set(0)

    @property
    def available(self) -> bool:
        """Whether Redis did what it was last asked."""
        return self._up.is_set()

    async def up(self) -> None:
        """Wait until Redis is there."""
        await self._up.wait()

    def attach(self, *, renewed: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Be called when Redis is reached (again) or was emptied, and when it is lost. Neither may block."""
        self._renewals.append(renewed)
        if lost is not None:
            self._losses.append(lost)

    def subscribe(self, channel: str, heard: Callable[[bytes], None]) -> None:
        """Hand each message of a channel to ``heard``, which must not block. Call it before `run`."""
        self._channels[channel.encode()] = heard

    def script(self, module_file: str) -> AsyncScript:
        """The Lua script beside a module, `MODULE.lua`, for `call`."""
        return self._redis.register_script(Path(module_file).with_suffix(".lua").read_text(encoding="utf-8"))

    async def call(self, script: AsyncScript, keys: Sequence[str], args: Iterable[EncodableT]) -> bytes | None:
        """Run a script, loading it if Redis has forgotten it. Raises `AwayError` at once while Redis is away."""
        if not self.available:
            raise AwayError
        try:
            async with asyncio.timeout(self._answer_s):
                answer: bytes | None = await script(list(keys), list(args))
        except _FAULTS as error:
            self._failed(error)
            raise AwayError from error
        return answer

    async def publish(self, channel: str, message: bytes) -> None:
        """Publish. Raises `AwayError`, at once while Redis is away."""
        if not self.available:
            raise AwayError
        try:
            async with asyncio.timeout(self._answer_s):
                await self._redis.publish(channel, message)
        except _FAULTS as error:
            self._failed(error)
            raise AwayError from error

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        backoff = Backoff(0.05, 1.0)
        try:
            while True:
                begun = time.monotonic()
                try:
                    await self._serve()
                except _FAULTS as error:
                    self._lost(error)
                if time.monotonic() - begun > _STABLE_S:
                    backoff.reset()
                await asyncio.sleep(backoff.next())
        finally:
            self._up.clear()
            REDIS_UP.set(0)
            await self._redis.aclose()

    async def _serve(self) -> None:
        """Hear and look, until something fails."""
        async with self._redis.pubsub() as subscription:
            async with asyncio.timeout(self._answer_s):
                await self._subscribed(subscription)
                self._epoch = await self._beat_script([self.epoch_key])
            self._found()
            next_beat = probed = self._last_echo = time.monotonic()
            while True:
                await self._hear(subscription, max(0.0, next_beat - time.monotonic()))
                if self._fault is not None:
                    raise self._fault
                now = time.monotonic()
                if now < next_beat:
                    continue
                next_beat = now + self._beat_s
                await self._beat()
                if now - probed >= self._probe_s:
                    if self._last_echo < probed:
                        raise TimeoutError("the subscription is silent")
                    probed = now
                    async with asyncio.timeout(self._answer_s):
                        await self._redis.publish(self._echo, b"")

    async def _subscribed(self, subscription: PubSub) -> None:
        await subscription.subscribe(*self._channels)
        confirmed = 0
        while confirmed < len(self._channels):
            confirmed += await self._hear(subscription, self._answer_s) == "subscribe"

    async def _hear(self, subscription: PubSub, timeout_s: float) -> str | None:
        message = await subscription.get_message(timeout=timeout_s)
        if message is None:
            return None
        kind: str = message["type"]
        if kind == "message":
            heard = self._channels.get(message["channel"])
            if heard is not None:
                self._guard(lambda: heard(message["data"]))
        return kind

    async def _beat(self) -> None:
        async with asyncio.timeout(self._answer_s):
            epoch = await self._beat_script([self.epoch_key])
        if epoch != self._epoch:
            self._epoch = epoch
            logger(__name__).warning("Redis was emptied; all is told again")
            self._renewed()

    def _echoed(self, _message: bytes) -> None:
        self._last_echo = time.monotonic()

    def _found(self) -> None:
        self._fault = None
        self._complaints.clear()
        if self._away_since is not None:
            logger(__name__).info("Redis is back", away_s=round(time.monotonic() - self._away_since, 1))
            self._away_since = None
        self._up.set()
        REDIS_UP.set(1)
        self._renewed()

    def _renewed(self) -> None:
        for renewed in self._renewals:
            self._guard(renewed)

    def _failed(self, error: BaseException) -> None:
        """A command failed: the link is lost, or Redis refuses this one thing."""
        if isinstance(error, _GONE):
            self._fault = error
            self._lost(error)
            return
        _LOOP.inc()
        kind = type(error).__name__
        if kind not in self._complaints:
            self._complaints.add(kind)
            logger(__name__).warning("Redis refuses a command", error=kind, text=str(error)[:200])

    def _lost(self, error: BaseException) -> None:
        _LOOP.inc()
        was_up = self.available
        self._up.clear()
        if self._away_since is None:
            self._away_since = time.monotonic()
            REDIS_UP.set(0)
            REDIS_OUTAGES.inc()
            logger(__name__).warning("Redis is away", error=type(error).__name__, text=str(error)[:200])
        if was_up:
            for lost in self._losses:
                self._guard(lost)

    @staticmethod
    def _guard(told: Callable[[], None]) -> None:
        try:
            told()
        except Exception:  # noqa: BLE001 - a fault of one listener is not the link's, nor another listener's
            REDIS_BAD_MESSAGES.inc()
            logger(__name__).exception("a listener of Redis failed")
