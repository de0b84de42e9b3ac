"""Consumers that end badly, and those who stop them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.errors import KafkaError

from shared.kafka import stop_reader


class Reader:
    """A consumer whose `stop` ends in this way."""

    def __init__(self, stops: Callable[[], Awaitable[None]]) -> None:
        self.stop = stops
        self.closed = False
        self._client = self

    async def close(self) -> None:
        self.closed = True


async def lets_a_cancellation_out() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def fails() -> None:
    raise KafkaError("away")


async def hangs() -> None:
    await asyncio.sleep(60)


async def ends() -> None:
    pass


@pytest.mark.parametrize("stops", [ends, fails, hangs, lets_a_cancellation_out])
async def test_whoever_stops_a_consumer_goes_on_however_it_ends(stops: Callable[[], Awaitable[None]]) -> None:
    reader = Reader(stops)
    await stop_reader(reader, 0.05)
    await asyncio.sleep(0)
    assert reader.closed


async def test_whoever_is_cancelled_meanwhile_is() -> None:
    reader = Reader(hangs)
    stopping = asyncio.create_task(stop_reader(reader, 60))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reader.closed
