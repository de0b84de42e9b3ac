"""The store's writer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from waybill_client.inbox import Inbox
from waybill_client.keeper import Keeper
from waybill_client.store import MemoryStore

if TYPE_CHECKING:
    import pytest

from tests.waiting import until


async def test_a_wake_up_with_nothing_to_store_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waybill_client.keeper.RENDERED_DELAY_S", 0.0)
    keeper = Keeper(None, MemoryStore(), Inbox(MemoryStore(), lambda event: None), lambda outputs: None,
                    max_queued=10, deliver=True, on_rewind=None)  # fmt: skip
    saves = 0

    async def save() -> None:
        nonlocal saves
        saves += 1
        assert saves < 100, "the writer spins"

    monkeypatch.setattr(keeper, "save", save)
    running = asyncio.create_task(keeper.run())
    keeper._rendered_due()
    await until(lambda: saves > 0, timeout=5, what="the wake-up")
    for _ in range(5):
        await asyncio.sleep(0)
    assert saves == 1
    running.cancel()
