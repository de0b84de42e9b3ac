import asyncio

import pytest

from services.relay.main import LoopEndedError, _never_ending


async def ends() -> None:
    await asyncio.sleep(0)


async def is_cancelled_from_within() -> None:
    await asyncio.sleep(0)
    raise asyncio.CancelledError


async def test_a_loop_that_ends_is_told_aloud() -> None:
    with pytest.raises(LoopEndedError, match="tail ended"):
        await _never_ending("tail", ends(), asyncio.Event())
    with pytest.raises(LoopEndedError, match="tail was cancelled from within"):
        await _never_ending("tail", is_cancelled_from_within(), asyncio.Event())


async def test_a_loop_may_end_once_told_to() -> None:
    stop = asyncio.Event()
    stop.set()
    await _never_ending("tail", ends(), stop)
    task = asyncio.create_task(_never_ending("tail", asyncio.sleep(60), stop))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
