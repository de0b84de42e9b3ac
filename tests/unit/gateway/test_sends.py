"""Sends: the order of a key is kept, never two batches of it are in flight, and each is answered."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.answers import Committed, Outcome
from services.gateway.sends import Key, Pending, Runs, Sends
from shared.contracts.frames import Send
from shared.errors import InternalError, UnavailableError
from shared.metrics import LOOP_ERRORS
from tests.waiting import until

ID = "00000000-0000-4000-8000-000000000000"


def pending(number: int, size: int = 2) -> Pending:
    body = msgspec.Raw(b"{" + b" " * (size - 2) + b"}")
    send = Send(rid=str(number), conversation_id=ID, client_msg_id="m", body=body)
    return Pending("ann", "phone", send, lambda _: None, 0.0)


def numbers(run: list[Pending]) -> list[int]:
    return [int(one.send.rid) for one in run]


def test_a_batch_holds_whole_runs_of_many_keys() -> None:
    runs = Runs()
    for number in range(6):
        runs.add(("ann", "ab"[number % 2]), pending(number))
    batch = runs.take(10, 1000)
    assert {key[1]: numbers(run) for key, run in batch.items()} == {"a": [0, 2, 4], "b": [1, 3, 5]}
    assert (runs.size, runs.ready) == (0, {})


@pytest.mark.promise("protocol.9.order_in")
def test_a_key_in_flight_gives_nothing_out() -> None:
    runs = Runs()
    key = ("ann", "c")
    runs.add(key, pending(0))
    batch = runs.take(10, 1000)
    runs.add(key, pending(1))
    assert runs.take(10, 1000) == {}
    runs.done(batch)
    assert numbers(runs.take(10, 1000)[key]) == [1]


def test_what_does_not_fit_waits_for_the_answer() -> None:
    runs = Runs()
    key = ("ann", "c")
    for number in range(3):
        runs.add(key, pending(number))
    batch = runs.take(2, 1000)
    assert numbers(batch[key]) == [0, 1]
    assert runs.take(2, 1000) == {}
    assert runs.size == 1
    runs.done(batch)
    assert numbers(runs.take(2, 1000)[key]) == [2]


def test_bytes_close_a_batch() -> None:
    runs = Runs()
    for number in range(4):
        runs.add(("ann", "ab"[number // 2]), pending(number, size=60))
    batch = runs.take(10, 100)
    assert {key[1]: numbers(run) for key, run in batch.items()} == {"a": [0, 1]}
    assert (runs.size, list(runs.ready)) == (2, [("ann", "b")])


STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abcd")),
    st.tuples(st.just("take"), st.integers(1, 5)),
    st.tuples(st.just("done"), st.integers(0, 5)),
)


@pytest.mark.promise("protocol.9.order_in")
@given(st.lists(STEPS, max_size=80), st.integers(2, 12))
def test_order_per_key_and_one_batch_in_flight_per_key(steps: list[tuple[str, str | int]], most_bytes: int) -> None:
    runs = Runs()
    added: dict[Key, list[int]] = defaultdict(list)
    given_out: dict[Key, list[int]] = defaultdict(list)
    flying: list[dict[Key, list[Pending]]] = []

    def take(most: int) -> None:
        batch = runs.take(most, most_bytes)
        assert sum(len(run) for run in batch.values()) <= most
        for key, run in batch.items():
            assert run
            assert not any(key in other for other in flying)
            given_out[key] += numbers(run)
        if batch:
            flying.append(batch)

    for number, (kind, what) in enumerate(steps):
        if kind == "add":
            key = ("ann", str(what))
            runs.add(key, pending(number))
            added[key].append(number)
        elif kind == "take":
            take(int(what))
        elif flying:
            runs.done(flying.pop(int(what) % len(flying)))
        assert runs.size == sum(len(queue) for queue in runs.waiting.values())
    while runs.size or flying:
        take(3)
        if flying:
            runs.done(flying.pop(0))
    assert given_out == added
    assert (runs.waiting, runs.ready, runs.in_flight) == ({}, {}, set())


class Ingest:
    """Takes the place of the post to ingest: answers each item, once ``open`` is set; raises ``fault`` if there is."""

    def __init__(self, sends: Sends, patch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.fault: Exception | None = None
        patch.setattr(sends, "_post", self._post)

    async def _post(self, _: str, body: dict[str, Any], __: float) -> bytes:
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        event = {"event_id": "e", "seq": 1, "created_at": "now", "duplicate": False}
        return msgspec.json.encode({"results": [{"status": 201, "event": event}] * len(body["events"])})


def errors() -> float:
    return float(LOOP_ERRORS.labels("sends")._value.get())


def submitted(sends: Sends, answer: Callable[[Outcome], None], size: int = 2, number: int = 0) -> None:
    sends.submit("ann", "phone", pending(number, size).send, answer)


async def test_bytes_are_held_until_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = Sends("http://nowhere", "s" * 32, timeout_s=5.0, most=100, most_bytes=100)
    ingest = Ingest(sends, monkeypatch)
    got: list[Outcome] = []
    task = asyncio.create_task(sends.run())
    submitted(sends, got.append, 60)
    await until(lambda: not sends._runs.size, timeout=5, what="the batch")
    submitted(sends, got.append, 40)
    with pytest.raises(UnavailableError) as refused:
        submitted(sends, got.append, 2)
    assert refused.value.retry_after_ms
    ingest.open.set()
    await until(lambda: len(got) == 2, timeout=5, what="the answers")
    submitted(sends, got.append, 100)
    await until(lambda: len(got) == 3, timeout=5, what="the answer")
    assert {type(one) for one in got} == {Committed}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("fault", "answer", "faults"),
    [(None, Committed, 1), (UnavailableError("away"), UnavailableError, 1), (ZeroDivisionError(), InternalError, 2)],
    ids=["good", "away", "bad"],
)
async def test_an_answer_that_raises_leaves_no_other_unanswered(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, answer: type, faults: int
) -> None:
    sends = Sends("http://nowhere", "s" * 32, timeout_s=5.0, most=100, most_bytes=100)
    ingest = Ingest(sends, monkeypatch)
    ingest.open.set()
    ingest.fault = fault
    got: list[Outcome] = []
    before = errors()

    def fails(_: Outcome) -> None:
        raise ValueError

    task = asyncio.create_task(sends.run())
    for number in range(3):
        submitted(sends, fails if number == 1 else got.append, number=number)
    await until(lambda: len(got) == 2, timeout=5, what="the others' answers")
    assert (errors() - before, {type(one) for one in got}) == (faults, {answer})
    submitted(sends, got.append)
    await until(lambda: len(got) == 3, timeout=5, what="one more")
    assert (task.done(), sends._bytes) == (False, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_waits_at_the_end_is_answered_though_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    sends = Sends("http://nowhere", "s" * 32, timeout_s=5.0, most=100, most_bytes=100)
    Ingest(sends, monkeypatch)
    got: list[Outcome] = []

    def fails(_: Outcome) -> None:
        raise ValueError

    task = asyncio.create_task(sends.run())
    submitted(sends, got.append)
    await until(lambda: not sends._runs.size, timeout=5, what="the batch")
    submitted(sends, fails)
    submitted(sends, got.append)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [type(one) for one in got] == [UnavailableError]
