"""News on its way to the app."""

from __future__ import annotations

import asyncio

import pytest
from waybill_client import Typing, errors
from waybill_client.inbox import Newest


async def test_of_several_about_the_same_the_newest_is_left_in_the_place_of_the_first() -> None:
    news = Newest[int]()
    for about, value in (("a", 1), ("b", 2), ("a", 3)):
        news.put(about, value)
    assert [await anext(news), await anext(news)] == [3, 2]


async def test_what_has_run_out_is_not_told() -> None:
    news = Newest[Typing](lambda typing: typing.for_ms / 1000)
    news.put(1, Typing("c", "gone", 0))
    news.put(2, Typing("c", "bob", 60_000))
    assert (await anext(news)).user_id == "bob"


async def test_the_end_comes_after_what_waits() -> None:
    news = Newest[int]()
    waiting = asyncio.ensure_future(anext(news))
    await asyncio.sleep(0)
    news.put("a", 1)
    assert await waiting == 1
    news.put("a", 2)
    news.finish(errors.Replaced("elsewhere"))
    assert await anext(news) == 2
    with pytest.raises(errors.Replaced):
        await anext(news)
