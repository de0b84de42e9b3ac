import asyncio

import pytest

from bench import e2e
from bench.e2e import Flights


def test_a_message_below_a_later_one_of_its_place_is_disordered() -> None:
    flights = Flights()
    for client_msg_id, seq in (("a", 1), ("c", 3), ("b", 2)):
        flights.arrive(("phone", "chat"), client_msg_id, seq, float(seq))
    assert (flights.disordered, flights.repeated) == (1, 0)


def test_other_places_and_chats_have_an_order_of_their_own() -> None:
    flights = Flights()
    flights.arrive(("phone", "chat"), "a", 5, 1.0)
    flights.arrive(("laptop", "chat"), "b", 4, 2.0)
    flights.arrive(("phone", "other chat"), "c", 3, 3.0)
    assert flights.disordered == 0


def test_the_first_arrival_counts() -> None:
    flights = Flights(begun={"a": 1.0}, expected={"a"})
    flights.arrive(("phone", "chat"), "a", 1, 1.010)
    flights.arrive(("phone", "chat"), "a", 1, 9.0)
    assert flights.repeated == 1
    assert flights.figures(flights.begun) == {"p50_ms": 10.0, "p99_ms": 10.0}


async def test_waiting_ends_with_the_last_arrival() -> None:
    flights = Flights(expected={"a"})
    asyncio.get_running_loop().call_later(0.01, flights.arrive, ("phone", "chat"), "a", 1, 1.0)
    async with asyncio.timeout(5):
        await flights.wait()


async def test_a_message_that_does_not_arrive_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e, "_ARRIVE_S", 0.01)
    with pytest.raises(RuntimeError, match="1 messages did not arrive"):
        await Flights(expected={"a"}).wait()
