"""What waits for Kafka's confirmation: nothing is lost by a failure, and nothing grows without end."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.errors import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import acks
from services.gateway.acks import Acks, Device, Mark, Waiting
from shared.clock import Backoff
from shared.errors import UnavailableError
from shared.kafka import partition_of
from shared.ranges import RangeSet
from tests.waiting import until

PHONE, TABLET = Device("c", "ann", "phone"), Device("c", "ann", "tablet")
AT = "2026-01-02T03:04:05.000006Z"


def records(waiting: Waiting) -> list[tuple[str, dict[str, Any]]]:
    """Key and value of each, in the order of a partition."""
    return [(key.decode(), json.loads(value)) for some in waiting.records(AT).values() for key, value in some]


class TestWaiting:
    @pytest.mark.promise("protocol.7.acks")
    def test_ranges_of_a_device_are_folded(self) -> None:
        waiting = Waiting()
        for low, high in ((1, 3), (7, 9), (4, 6)):
            waiting.hold(PHONE, [(low, high)])
        assert records(waiting) == [
            (
                "c",
                {
                    "conversation_id": "c",
                    "user_id": "ann",
                    "device_id": "phone",
                    "kind": "delivered",
                    "ranges": [[1, 9]],
                    "at": AT,
                },
            )
        ]
        assert len(waiting) == 1

    def test_most_only_lengthen_the_last_one(self) -> None:
        waiting = Waiting()
        for seq in range(1, 2_000):
            waiting.hold(PHONE, [(seq, seq)])
        waiting.hold(PHONE, [(1_990, 2_500), (2_400, 2_401)])
        assert waiting.held == {PHONE: [(1, 2_500)]}

    def test_however_scattered_they_are_folded_now_and_then(self) -> None:
        waiting = Waiting()
        for seq in (*range(2_200, 0, -2), *range(2_201, 0, -2)):
            waiting.hold(PHONE, [(seq, seq)])
        assert len(waiting.held[PHONE]) <= 1_001
        assert list(RangeSet(waiting.held[PHONE])) == [(1, 2_201)]

    @pytest.mark.promise("protocol.7.acks")
    def test_marks_keep_their_order(self) -> None:
        waiting = Waiting()
        for seq in (5, 3, 9):
            waiting.mark(Mark(PHONE, "read", seq, 0))
        waiting.mark(Mark(PHONE, "unread", 1, 1))
        assert [(value["kind"], value["seq"], value["version"]) for _, value in records(waiting)] == [
            ("read", 5, 0),
            ("read", 3, 0),
            ("read", 9, 0),
            ("unread", 1, 1),
        ]

    def test_a_record_has_as_many_ranges_as_a_frame_may(self) -> None:
        waiting = Waiting()
        waiting.hold(PHONE, RangeSet((2 * n, 2 * n) for n in range(1, 2502)))
        assert [len(value["ranges"]) for _, value in records(waiting)] == [1000, 1000, 501]

    @pytest.mark.promise("protocol.9.kafka")
    def test_each_goes_to_the_partition_of_its_conversation(self) -> None:
        waiting = Waiting()
        for number in range(50):
            waiting.hold(Device(f"c{number}", "ann", "phone"), [(1, 1)])
            waiting.mark(Mark(Device(f"c{number}", "ann", "phone"), "read", 1, 0))
        for partition, some in waiting.records(AT).items():
            assert {partition_of(key.decode()) for key, _ in some} == {partition}

    @pytest.mark.promise("I10")
    def test_what_was_not_confirmed_goes_again_before_what_came_since(self) -> None:
        waiting = Waiting()
        waiting.hold(PHONE, [(1, 3)])
        waiting.mark(Mark(PHONE, "read", 3, 0))
        taken = waiting.take(10)
        assert len(waiting) == 0
        waiting.hold(PHONE, [(5, 5)])
        waiting.hold(TABLET, [(1, 1)])
        waiting.mark(Mark(PHONE, "read", 5, 0))
        waiting.put_back(taken)
        held = {device: list(RangeSet(ranges)) for device, ranges in waiting.held.items()}
        assert held == {PHONE: [(1, 3), (5, 5)], TABLET: [(1, 1)]}
        assert [mark.seq for mark in waiting.marks[PHONE]] == [3, 5]
        assert len(waiting) == 4

    def test_a_device_and_all_together_have_a_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acks, "_MOST_OF_DEVICE", 2)
        monkeypatch.setattr(acks, "_MOST_MARKS", 3)
        waiting = Waiting()
        for seq in (1, 2):
            waiting.mark(Mark(PHONE, "read", seq, 0))
        with pytest.raises(UnavailableError):
            waiting.mark(Mark(PHONE, "read", 3, 0))
        waiting.mark(Mark(TABLET, "read", 1, 0))
        with pytest.raises(UnavailableError):
            waiting.mark(Mark(TABLET, "read", 2, 0))
        waiting.take(10)
        waiting.mark(Mark(PHONE, "read", 3, 0))

    def test_what_is_said_again_does_not_wait_twice_and_takes_nobodys_room(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(acks, "_MOST_OF_DEVICE", 2)
        waiting = Waiting()
        for seq in (1, 1, 2, 3):
            waiting.mark_again(Mark(PHONE, "read", seq, 0))
        assert ([mark.seq for mark in waiting.marks[PHONE]], len(waiting)) == ([1, 2], 2)


DEVICES = st.builds(Device, st.sampled_from("abc"), st.just("ann"), st.sampled_from(["phone", "tablet"]))
STEPS = st.one_of(
    st.tuples(st.just("hold"), DEVICES, st.integers(1, 30)),
    st.tuples(st.just("mark"), DEVICES, st.integers(1, 30)),
    st.tuples(st.sampled_from(["flush", "fail"]), st.none(), st.integers(1, 4)),
)


@given(st.lists(STEPS, max_size=40))
def test_nothing_is_lost_however_often_kafka_fails(steps: list[tuple[str, Device | None, int]]) -> None:
    waiting = Waiting()
    given_seqs: set[tuple[Device, int]] = set()
    confirmed: set[tuple[Device, int]] = set()
    marks: dict[Device, list[int]] = {}
    marked: dict[Device, list[int]] = {}

    def confirm(taken: Waiting) -> None:
        for _, value in records(taken):
            device = Device(value["conversation_id"], value["user_id"], value["device_id"])
            if value["kind"] == "delivered":
                confirmed.update((device, seq) for low, high in value["ranges"] for seq in range(low, high + 1))
            else:
                marked.setdefault(device, []).append(value["seq"])

    for kind, device, number in steps:
        if kind == "hold" and device is not None:
            waiting.hold(device, [(number, number)])
            given_seqs.add((device, number))
        elif kind == "mark" and device is not None:
            waiting.mark(Mark(device, "read", number, 0))
            marks.setdefault(device, []).append(number)
        else:
            taken = waiting.take(number)
            if kind == "flush":
                confirm(taken)
            else:
                waiting.put_back(taken)
    while len(waiting):
        confirm(waiting.take(2))
    assert confirmed == given_seqs
    assert marked == marks


class Kafka:
    """Takes two records to a batch. ``fails``: what the next batches end with."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.batches = 0
        self.fails: list[Exception] = []
        self.producers = 0
        self.stopped = 0

    def __call__(self, *_: Any, **__: Any) -> "Kafka":
        self.producers += 1
        return self

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped += 1

    def create_batch(self) -> "Batch":
        return Batch()

    async def send_batch(self, batch: "Batch", *_: Any, **__: Any) -> asyncio.Future[Any]:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.batches += 1
        if self.fails:
            outcome.set_exception(self.fails.pop(0))
        else:
            self.got += batch.values
            outcome.set_result(None)
        return outcome


class Batch:
    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    def append(self, *, key: bytes, value: bytes, timestamp: int | None) -> bool | None:
        if len(self.values) == 2:
            return None
        self.values.append(json.loads(value))
        return True


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    made = Kafka()
    monkeypatch.setattr(acks, "producer", made)
    monkeypatch.setattr(acks, "Backoff", lambda: Backoff(0.001, 0.002))
    return made


@pytest.fixture
async def written(kafka: Kafka) -> AsyncIterator[Acks]:
    made = Acks("nowhere", "acks", flush_s=0.0, later_s=60.0, client_id="test")
    task = asyncio.create_task(made.run())
    yield made
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TestWriting:
    async def test_all_is_written_in_as_many_batches_as_it_takes(self, written: Acks, kafka: Kafka) -> None:
        for number in range(5):
            written.hold(Device("c", "ann", f"d{number}"), [(1, number + 1)])
        assert await written.drained(20)
        assert [value["ranges"] for value in kafka.got] == [[[1, number]] for number in range(1, 6)]
        assert (kafka.batches, kafka.producers) == (3, 1)

    @pytest.mark.promise("I10")
    async def test_after_a_failure_it_goes_again_with_a_new_producer(self, written: Acks, kafka: Kafka) -> None:
        kafka.fails += [KafkaError(), TimeoutError(), OSError()]
        written.hold(PHONE, [(1, 3)])
        written.mark(Mark(PHONE, "read", 3, 0))
        assert await written.drained(20)
        assert [value["kind"] for value in kafka.got] == ["delivered", "read"]
        assert kafka.producers == 4
        assert kafka.stopped == 3

    async def test_one_batch_of_several_that_fails_brings_all_again(self, written: Acks, kafka: Kafka) -> None:
        kafka.fails.append(KafkaError())
        for number in range(3):
            written.hold(Device("c", "ann", f"d{number}"), [(1, 1)])
        assert await written.drained(20)
        assert {value["device_id"] for value in kafka.got} == {"d0", "d1", "d2"}

    async def test_what_does_not_get_there_in_time_is_said(self, kafka: Kafka) -> None:
        made = Acks("nowhere", "acks", flush_s=0.0, later_s=0.0, client_id="test")
        assert await made.drained(0.01)
        made.hold(PHONE, [(1, 1)])
        assert not await made.drained(0.01)

    async def test_what_nobody_waits_for_is_gathered_for_longer(self, written: Acks, kafka: Kafka) -> None:
        written.hold(PHONE, [(1, 1)], later=True)
        written.hold(PHONE, [(2, 2)], later=True)
        written.hold(TABLET, [(1, 1)])
        await until(lambda: kafka.got, timeout=20, what="the tablet's")
        assert [value["device_id"] for value in kafka.got] == ["tablet"]
        assert await written.drained(20)
        assert [(value["device_id"], value["ranges"]) for value in kafka.got[1:]] == [("phone", [[1, 2]])]

    async def test_but_not_for_longer_than_its_session(self, written: Acks, kafka: Kafka) -> None:
        written.hold(PHONE, [(1, 2)], later=True)
        written.hold(TABLET, [(1, 2)], later=True)
        written.hurry(PHONE)
        written.hurry(Device("c", "nobody", "phone"))
        await until(lambda: kafka.got, timeout=20, what="the phone's")
        assert [value["device_id"] for value in kafka.got] == ["phone"]

    async def test_nor_for_longer_than_its_time(self, kafka: Kafka) -> None:
        made = Acks("nowhere", "acks", flush_s=0.0, later_s=0.01, client_id="test")
        task = asyncio.create_task(made.run())
        made.hold(PHONE, [(1, 2)], later=True)
        await until(lambda: kafka.got, timeout=20, what="the phone's")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
