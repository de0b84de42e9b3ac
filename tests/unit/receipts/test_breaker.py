import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.receipts.breaker import Breaker, BreakerTrippedError


def test_a_few_bad_records_among_few_do_not_stop_it() -> None:
    breaker = Breaker(share=0.5, least=20, window=1000)
    for _ in range(19):
        breaker.judge(1, 1)
    with pytest.raises(BreakerTrippedError, match="20 of the last 20"):
        breaker.judge(1, 1)


def test_the_share_is_of_the_last_records_only() -> None:
    breaker = Breaker(share=0.5, least=5, window=100)
    breaker.judge(10_000, 0)
    breaker.judge(100, 0)
    breaker.judge(60, 10)
    breaker.judge(60, 40)
    with pytest.raises(BreakerTrippedError):
        breaker.judge(100, 90)


def test_good_records_never_trip_it() -> None:
    breaker = Breaker(share=0.1, least=1, window=10)
    with pytest.raises(BreakerTrippedError):
        breaker.judge(2, 2)
    breaker.judge(8, 0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=60))
def test_it_holds_just_the_batches_that_reach_back_a_window(steps: list[tuple[int, int]]) -> None:
    breaker, kept = Breaker(share=0.5, least=10, window=40), list[tuple[int, int]]()
    for seen, wanted in steps:
        bad = min(seen, wanted)
        all_seen, all_bad = sum(s for s, _ in kept) + seen, sum(b for _, b in kept) + bad
        if bad and all_bad >= 10 and all_bad > 0.5 * all_seen:
            with pytest.raises(BreakerTrippedError):
                breaker.judge(seen, bad)
            continue
        breaker.judge(seen, bad)
        kept.append((seen, bad))
        while sum(s for s, _ in kept[1:]) >= 40:
            kept.pop(0)


def test_a_batch_that_is_judged_anew_counts_once_with_what_was_found_of_it_later() -> None:
    breaker = Breaker(share=0.5, least=5, window=1000)
    breaker.judge(10, 0)
    breaker.judge(10, 4)
    breaker.judge(0, 5)
    breaker.undo()
    for _ in range(10):
        breaker.judge(1, 1)
    with pytest.raises(BreakerTrippedError, match="11 of the last 21"):
        breaker.judge(1, 1)
