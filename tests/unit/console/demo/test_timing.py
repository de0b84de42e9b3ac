from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.demo.timing import Flight, flights, outside, percentile
from tests.unit.console.demo.stories import EVENTS, outcome

pytestmark = pytest.mark.promise("protocol.9.demo")


def test_a_flight_is_from_the_first_write_to_the_first_read_of_another_device() -> None:
    found = flights(outcome().recordings)
    # Sent by ada-phone, so ben-phone alone is a receiver; repeats of a later session are not read again.
    assert len(found) == 2 * (EVENTS - 1)
    first = min(found)
    assert first.written == 20.0
    assert first.read == pytest.approx(21.002)


def test_a_device_whose_app_was_closed_when_it_was_sent_is_no_measure_of_the_way() -> None:
    recordings = outcome().recordings
    recordings[1].online = [(0.0, 30.0), (45.0, 1000.0)]
    assert {one.written for one in flights(recordings)} == {20.0, 50.0, 60.0}


def test_outside_leaves_out_what_a_fault_fell_into() -> None:
    found = [Flight(1.0, 2.0), Flight(2.5, 3.5), Flight(3.2, 3.3), Flight(4.5, 6.0), Flight(5.0, 5.1)]
    assert outside(found, [(3.0, 4.0)]) == [Flight(1.0, 2.0), Flight(4.5, 6.0), Flight(5.0, 5.1)]


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_that_share_of_the_values_is_at_or_below_a_percentile(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
