from hypothesis import given
from hypothesis import strategies as st

from services.relay.breaker import Breaker, Limits

LIMITS = Limits(share=0.2, least=3, window_s=60)


def refusals(breaker: Breaker, count: int, now: float = 0) -> list[str | None]:
    return [breaker.refused(now) for _ in range(count)]


def test_a_few_refused_rows_among_many_stop_nothing() -> None:
    breaker = Breaker(LIMITS)
    breaker.sent(97, 0)
    assert refusals(breaker, 20) == [None] * 20


def test_above_the_share_and_the_least_it_trips_and_does_not_count_that_row() -> None:
    breaker = Breaker(LIMITS)
    first, second, third = refusals(breaker, 3)
    assert (first, second) == (None, None)
    assert third == "3 of the last 3 rows were refused within 60 s"
    assert refusals(breaker, 1) == [third]


def test_what_is_long_ago_does_not_count() -> None:
    breaker = Breaker(LIMITS)
    refusals(breaker, 2, now=0)
    assert refusals(breaker, 2, now=61) == [None, None]
    assert refusals(breaker, 1, now=61) != [None]


def test_half_open_one_refused_row_trips_it_until_enough_are_taken() -> None:
    breaker = Breaker(LIMITS)
    breaker.half_open()
    breaker.sent(2, 0)
    assert refusals(breaker, 1) != [None]
    breaker.sent(1, 0)
    assert refusals(breaker, 1) == [None]


def test_a_share_of_one_turns_it_off() -> None:
    assert refusals(Breaker(Limits(share=1, least=1, window_s=60)), 1000) == [None] * 1000


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50), st.floats(0, 30)), max_size=60))
def test_it_trips_exactly_as_a_recount_says(steps: list[tuple[bool, int, float]]) -> None:
    breaker, now = Breaker(LIMITS), 0.0
    counted: list[tuple[float, int, int]] = []
    for bad, rows, pause in steps:
        now = float(int(now + pause))
        counted = [one for one in counted if one[0] > now - LIMITS.window_s]
        if not bad:
            breaker.sent(rows, now)
            counted.append((now, rows, 0))
            continue
        seen, refused = sum(one[1] for one in counted) + 1, sum(one[2] for one in counted) + 1
        trips = refused >= LIMITS.least and refused > LIMITS.share * seen
        assert (breaker.refused(now) is not None) == trips
        if not trips:
            counted.append((now, 1, 1))
