import asyncio

import pytest

from bench.loads import closed_loop, open_loop


async def test_a_closed_loop_counts_what_ended_in_the_measured_time() -> None:
    ended = asyncio.Event()

    async def call() -> int:
        await asyncio.sleep(0.01)
        return 5

    async def end() -> None:
        ended.set()

    turn = await closed_loop(call, callers=4, warm_s=0.05, measure_s=0.3, end=end)
    assert ended.is_set()
    assert turn.rate_s is not None
    assert 0 < turn.rate_s <= 4 * 5 / 0.01
    assert all(latency >= 0.009 for latency in turn.latencies)


async def test_a_closed_loop_never_has_more_calls_under_way_than_callers() -> None:
    under_way = most = 0

    async def call() -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return 1

    async def end() -> None:
        pass

    await closed_loop(call, callers=3, warm_s=0.0, measure_s=0.1, end=end)
    assert most == 3


async def test_a_failed_call_ends_a_closed_loop() -> None:
    async def call() -> int:
        raise RuntimeError("refused")

    async def end() -> None:
        pass

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError), pytest.RaisesExc(RuntimeError)):
        await closed_loop(call, callers=2, warm_s=0.0, measure_s=5.0, end=end)


async def test_an_open_loop_begins_calls_while_earlier_ones_are_under_way() -> None:
    begun: list[tuple[int, bool]] = []

    async def call(number: int, counts: bool) -> None:
        begun.append((number, counts))
        await asyncio.sleep(0.1)

    async with asyncio.timeout(5):
        late = await open_loop(call, rate_s=200, warm_s=0.05, measure_s=0.1)
    assert [number for number, _ in begun] == list(range(30))
    assert [counts for _, counts in begun] == [False] * 10 + [True] * 20
    assert late >= 0


async def test_an_open_loop_that_cannot_keep_its_rate_says_so() -> None:
    async def call(_: int, counts: bool) -> None:
        await asyncio.sleep(10)

    with pytest.RaisesGroup(RuntimeError):
        await open_loop(call, rate_s=1000, warm_s=0, measure_s=1, most=5)
