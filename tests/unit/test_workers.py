from __future__ import annotations

import pytest

from tests.workers import share

WHOLE = range(1, 16)


def of(worker: int, count: int) -> dict[str, str]:
    return {"PYTEST_XDIST_WORKER": f"gw{worker}", "PYTEST_XDIST_WORKER_COUNT": str(count)}


def test_alone_it_has_all() -> None:
    assert share(WHOLE, {}) == WHOLE


@pytest.mark.parametrize("count", [1, 2, 3, 15])
def test_no_two_have_the_same_number(count: int) -> None:
    shares = [share(WHOLE, of(worker, count)) for worker in range(count)]
    numbers = [number for part in shares for number in part]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(WHOLE)
    assert {len(part) for part in shares} == {len(WHOLE) // count}


def test_too_many_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="16 workers"):
        share(WHOLE, of(0, 16))
