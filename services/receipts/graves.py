"""Where records go that cannot be read: the dead-letter topic, by a producer of its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiokafka.errors import KafkaError

from shared.dead_letter import bury
from shared.kafka import producer

if TYPE_CHECKING:
    from aiokafka import AIOKafkaProducer

    from shared.kafka import Consumed

_BURY_S = 15.0
_CLOSE_S = 2.0


class Graves:
    """Opens its producer for the first bad record, and a new one after a failure."""

    def __init__(self, bootstrap: str, topic: str, *, client_id: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._client_id = client_id
        self._producer: AIOKafkaProducer | None = None

    async def bury(self, record: Consumed, error: str) -> None:
        """Returns once Kafka has it. Raises `KafkaError`, `OSError`, `TimeoutError`: it may or may not have it then."""
        try:
            async with asyncio.timeout(_BURY_S):
                if self._producer is None:
                    self._producer = producer(self._bootstrap, client_id=self._client_id)
                    await self._producer.start()
                await bury(self._producer, self._topic, record, error)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the producer, if there is one."""
        made, self._producer = self._producer, None
        if made is not None:
            with contextlib.suppress(KafkaError, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await made.stop()
