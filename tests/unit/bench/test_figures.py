import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Turn, medians, percentile, ratio


def test_a_turn_tells_milliseconds_and_the_rate() -> None:
    turn = Turn([0.001 * number for number in range(1, 101)], 512.345)
    assert turn.figures() == {"rate_s": 512.3, "p50_ms": 50.0, "p99_ms": 99.0}


def test_an_open_loop_has_no_rate() -> None:
    assert "rate_s" not in Turn([0.002]).figures()


def test_a_turn_without_a_measurement_is_none() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Turn([], 0.0).figures()


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_a_value_with_its_share_at_or_below_it(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


def test_medians_are_taken_figure_by_figure() -> None:
    turns = [{"rate_s": 1.0, "p50_ms": 9.0}, {"rate_s": 3.0, "p50_ms": 5.0}, {"rate_s": 2.0, "p50_ms": 7.0}]
    assert medians(turns) == {"rate_s": 2.0, "p50_ms": 7.0}


def test_above_one_means_better_whichever_way_a_figure_goes() -> None:
    found = ratio({"rate_s": 1000.0, "p50_ms": 10.0}, {"rate_s": 200.0, "p50_ms": 1500.0})
    assert found == {"rate_s": 5.0, "p50_ms": 150.0}


def test_below_one_means_worse() -> None:
    assert ratio({"rate_s": 100.0, "p99_ms": 20.0}, {"rate_s": 200.0, "p99_ms": 10.0}) == {"rate_s": 0.5, "p99_ms": 0.5}


def test_only_what_both_have_is_compared_and_nothing_is_divided_by_zero() -> None:
    assert ratio({"p50_ms": 0.0, "p99_ms": 2.0, "sent_ms": 1.0}, {"p50_ms": 1.0, "p99_ms": 3.0}) == {"p99_ms": 1.5}
