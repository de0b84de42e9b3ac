"""Every frame of every SDK client in these tests is held against the AsyncAPI document."""

from collections.abc import Iterator

import pytest

from tests.frames import sdk_watched


@pytest.fixture(scope="module", autouse=True)
def _faults() -> Iterator[list[str]]:
    with sdk_watched() as faults:
        yield faults


@pytest.fixture(autouse=True)
def _frames_are_in_the_document(_faults: list[str]) -> Iterator[None]:
    yield
    found = _faults[:5]
    _faults.clear()
    assert found == []
