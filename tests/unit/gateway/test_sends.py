"""Runs of sends: the order of a key is kept, and never two batches of it are in flight."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.sends import Key, Pending, Runs
from shared.contracts.frames import Send

ID = "00000000-0000-4000-8000-000000000000"


def pending(number: int, size: int = 2) -> Pending:
    body = msgspec.Raw(b"{" + b" " * (size - 2) + b"}")
    send = Send(rid=str(number), conversation_id=ID, client_msg_id="m", body=body)
    return Pending("ann", send, lambda _: None, 0.0)


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
