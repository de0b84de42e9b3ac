import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from structlog.testing import capture_logs

from services.ingest.admission import Send
from services.ingest.lanes import Lanes, Limits
from services.ingest.writer import Answer, BadRowError, Written
from shared.contracts.body import parse
from shared.contracts.sends import Draft
from shared.errors import ForbiddenError, InternalError, TimedOutError, UnavailableError
from shared.kafka import partition_of
from tests.waiting import until

GROUPS = [f"00000000-0000-4000-8000-{n:012d}" for n in range(40)]


def send(group: int = 0, name: str = "one", kind: str = "message", size: int = 2) -> Send:
    draft = Draft(
        conversation_id=GROUPS[group],
        client_msg_id=name,
        sender_id="ann",
        type=kind,
        body=parse(b'{"x":"%b"}' % (b"x" * size)),
        target_seq=None,
        traceparent=None,
    )
    return Send(draft=draft, as_service=False, digest=b"")


def written(one: Send) -> Written:
    draft = one.draft
    return Written(
        conversation_id=draft.conversation_id,
        client_msg_id=draft.client_msg_id,
        event_id="",
        seq=1,
        created_at="",
        duplicate=False,
    )


class Store:
    """Keeps the batches that it was given; holds them back while its gate is closed."""

    def __init__(self) -> None:
        self.batches: list[list[Send]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.bad: set[str] = set()
        self.active: list[int] = []
        self.overlap: set[int] = set()

    async def write(self, sends: Sequence[Send]) -> list[Answer]:
        self.batches.append(list(sends))
        shards = {partition_of(one.draft.conversation_id) for one in sends}
        self.overlap |= shards & set(self.active)
        self.active.extend(shards)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            for shard in shards:
                self.active.remove(shard)
        if self.error is not None:
            raise self.error
        if any(one.draft.client_msg_id in self.bad for one in sends):
            raise BadRowError("22000")
        return [written(one) for one in sends]

    @property
    def names(self) -> list[list[str]]:
        return [[one.draft.client_msg_id for one in batch] for batch in self.batches]


@asynccontextmanager
async def running(store: Store, **limits: float) -> AsyncIterator[Lanes]:
    lanes = Lanes(store.write, Limits(**limits))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(lanes.run())
        yield lanes
        lanes.stop()


async def test_sends_that_arrive_together_are_written_together() -> None:
    store = Store()
    async with running(store, gather_s=0.02) as lanes:
        answers = await asyncio.gather(*(lanes.send([send(name=str(n))]) for n in range(10)))
    assert store.names == [[str(n) for n in range(10)]]
    assert [answer[0].client_msg_id for answer in answers if isinstance(answer[0], Written)] == [
        str(n) for n in range(10)
    ]


async def test_each_gets_its_own_answer_in_order() -> None:
    store = Store()

    async def write(sends: Sequence[Send]) -> list[Answer]:
        return [ForbiddenError("no") if one.draft.client_msg_id == "b" else written(one) for one in sends]

    store.write = write
    async with running(store) as lanes:
        answers = await lanes.send([send(name="a"), send(1, "b"), send(2, "c"), send(1, "d")])
    assert [getattr(answer, "client_msg_id", "refused") for answer in answers] == ["a", "refused", "c", "d"]
    assert await lanes_that_stopped_refuse(lanes)


async def lanes_that_stopped_refuse(lanes: Lanes) -> bool:
    with pytest.raises(UnavailableError):
        await lanes.send([send()])
    return True


async def test_logs_name_the_conversation_the_event_and_the_trace() -> None:
    store, trace = Store(), "4bf92f3577b34da6a3ce929d0e0e4736"
    one = send(name="traced")
    traced = msgspec.structs.replace(
        one, draft=msgspec.structs.replace(one.draft, traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    )
    with capture_logs() as logged:
        async with running(store) as lanes:
            await lanes.send([traced])
            store.bad.add("traced")
            await lanes.send([traced])
    assert [entry["event"] for entry in logged] == ["written", "refused by the store"]
    assert {(entry["conversation_id"], entry["trace_id"]) for entry in logged} == {(GROUPS[0], trace)}
    assert logged[0]["event_id"] == written(one).event_id


async def test_two_batches_of_one_shard_never_overlap() -> None:
    store = Store()
    async with running(store, gather_s=0, batch_items=3) as lanes:
        await asyncio.gather(*(lanes.send([send(n % 40, str(n))]) for n in range(400)))
    assert store.overlap == set()
    assert sum(map(len, store.batches)) == 400
    assert max(map(len, store.batches)) == 3


async def test_a_conversation_is_written_in_the_order_of_arrival() -> None:
    store = Store()
    kinds = ["message", "edit", "message", "message", "member", "message"]
    async with running(store, gather_s=0.005) as lanes:
        await lanes.send([send(0, str(n), kind) for n, kind in enumerate(kinds)])
    assert store.names == [["0"], ["1"], ["2", "3"], ["4"], ["5"]]


async def test_one_bad_send_fails_alone() -> None:
    store = Store()
    store.bad = {"3", "7"}
    async with running(store, gather_s=0.005) as lanes:
        answers = await lanes.send([send(name=str(n)) for n in range(9)])
    assert [isinstance(answer, Written) for answer in answers] == [n not in (3, 7) for n in range(9)]
    assert all(isinstance(answers[n], InternalError) for n in (3, 7))
    passed = [batch for batch in store.names if not set(batch) & store.bad]
    assert [name for batch in passed for name in batch] == [str(n) for n in range(9) if n not in (3, 7)]


async def test_trouble_is_everybodys_answer_and_the_lane_goes_on() -> None:
    store = Store()
    async with running(store) as lanes:
        store.error = UnavailableError("away")
        assert await lanes.send([send(), send(name="two")]) == [store.error] * 2
        store.error = RuntimeError("a bug")
        (answer,) = await lanes.send([send()])
        assert isinstance(answer, InternalError)
        store.error = None
        (answer,) = await lanes.send([send()])
        assert isinstance(answer, Written)


@pytest.mark.promise("protocol.4.indefinite")
async def test_a_full_queue_refuses_the_whole_request() -> None:
    store = Store()
    async with running(store, queue_items=4) as lanes:
        store.gate.clear()
        first = asyncio.create_task(lanes.send([send(name=str(n)) for n in range(3)]))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError) as refused:
            await lanes.send([send(), send()])
        assert refused.value.retry_after_ms is not None
        second = asyncio.create_task(lanes.send([send(name="fits")]))
        await asyncio.sleep(0)
        store.gate.set()
        await asyncio.gather(first, second)
        assert len(await lanes.send([send(name=str(n)) for n in range(4)])) == 4


async def test_bytes_bound_the_queue_but_one_request_always_fits() -> None:
    store = Store()
    async with running(store, queue_bytes=100) as lanes:
        store.gate.clear()
        first = asyncio.create_task(lanes.send([send(size=500)]))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await lanes.send([send(size=1)])
        store.gate.set()
        assert isinstance((await first)[0], Written)


@pytest.mark.promise("protocol.4.indefinite")
async def test_what_is_late_gets_timeout_and_what_no_lane_began_is_not_written() -> None:
    store = Store()
    async with running(store, send_timeout_s=0.05) as lanes:
        store.gate.clear()
        late = [asyncio.create_task(lanes.send([send(name=name)])) for name in ("begun",)]
        await until(lambda: store.batches, timeout=5, what="a batch is begun")
        late.append(asyncio.create_task(lanes.send([send(name="waits")])))
        for (answer,) in await asyncio.gather(*late):
            assert isinstance(answer, TimedOutError)
        store.gate.set()
        assert isinstance((await lanes.send([send(name="next")]))[0], Written)
    assert store.names == [["begun"], ["next"]]


async def test_stop_writes_what_waits() -> None:
    store = Store()
    async with running(store, gather_s=0.1) as lanes:
        store.gate.clear()
        sending = [asyncio.create_task(lanes.send([send(n)])) for n in range(20)]
        await asyncio.sleep(0)
        lanes.stop()
        lanes.stop()
        store.gate.set()
    assert all(isinstance(task.result()[0], Written) for task in sending)
    assert sum(map(len, store.batches)) == 20


async def test_cancelling_the_lanes_ends_them() -> None:
    store = Store()
    store.gate.clear()
    lanes = Lanes(store.write, Limits(send_timeout_s=0.05))
    run = asyncio.create_task(lanes.run())
    sending = asyncio.create_task(lanes.send([send()]))
    await until(lambda: store.batches, timeout=5, what="a batch is begun")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert isinstance((await sending)[0], TimedOutError)


async def test_nothing_to_send() -> None:
    async with running(Store()) as lanes:
        assert await lanes.send([]) == []
