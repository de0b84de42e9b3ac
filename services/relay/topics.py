"""Whether Kafka forgets in time what was erased: asked now and then, since anybody may change a topic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from services.relay.metrics import TOPIC_KEEPS
from shared.clock import Backoff
from shared.keeping import kept_by
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from shared.kafka import Topics

_LOOK_EVERY_S = 600.0
_LOOK_S = 30.0

_log = logger(__name__)


class TopicsWatch:
    """Warns of topics that keep records for longer than ``erase_within_s``. It changes none: `waybill migrate` does."""

    def __init__(self, bootstrap: str, topics: Topics, erase_within_s: float) -> None:
        self._bootstrap = bootstrap
        self._topics = topics
        self._erase_within_s = erase_within_s
        self.warning: str | None = None

    async def run(self) -> NoReturn:
        """Look until cancelled; with backoff while Kafka is away."""
        backoff = Backoff(base_s=1.0, cap_s=60.0)
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self.look()
            except (KafkaError, OSError, TimeoutError) as error:
                LOOP_ERRORS.labels("topics").inc()
                _log.warning("topics not looked at", error=repr(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Look once. Raises what aiokafka raises."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap, request_timeout_ms=round(_LOOK_S * 500))
        await admin.start()
        try:
            there = set(await admin.list_topics()).intersection(self._topics.all)
            kept = await kept_by(admin, sorted(there))
        finally:
            await admin.close()
        for topic, seconds in kept.items():
            TOPIC_KEEPS.labels(self._topics.without_prefix(topic)).set(seconds)
        long = [topic for topic, seconds in kept.items() if seconds > self._erase_within_s]
        self.warning = None
        if long:
            self.warning = f"kept for longer than {self._erase_within_s:g} s by: {', '.join(long)}"
            _log.warning("topics keep for too long what was erased", topics=long, erase_within_s=self._erase_within_s)
