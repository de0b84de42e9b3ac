import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.relay.retries import Retries


@pytest.mark.parametrize(
    ("attempts", "expected"), [(1, 5_000), (2, 20_000), (3, 80_000), (5, 1_280_000), (7, 1_800_000)]
)
def test_the_defaults_of_the_settings(attempts: int, expected: int) -> None:
    retries = Retries(max_attempts=8, delay_ms=5_000, factor=4, cap_ms=1_800_000)
    outcome, wait_ms = retries.after(attempts, random.Random(1))
    assert outcome == "failed"
    assert 0.8 * expected <= wait_ms <= min(1.2 * expected, 1_800_000)


def test_all_tries_count_the_first_included() -> None:
    assert Retries(1, 5, 4, 10).after(1, random.Random()).outcome == "dead"
    assert Retries(8, 5, 4, 10).after(7, random.Random()).outcome == "failed"
    assert Retries(8, 5, 4, 10).after(8, random.Random()).outcome == "dead"


@given(st.integers(1, 10_000), st.integers(1, 10**8), st.floats(1, 100), st.integers(1, 10**8), st.integers())
def test_a_wait_is_never_above_the_cap(attempts: int, delay_ms: int, factor: float, cap_ms: int, seed: int) -> None:
    verdict = Retries(10_001, delay_ms, factor, cap_ms).after(attempts, random.Random(seed))
    assert verdict.outcome == "failed"
    assert 0 <= verdict.wait_ms <= cap_ms
