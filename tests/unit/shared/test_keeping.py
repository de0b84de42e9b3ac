import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.keeping import ERASE_WITHIN_S, keeping, kept_s


@given(st.floats(1, 10 * 365 * 86_400))
def test_a_topic_of_ours_keeps_nothing_for_longer(erase_within_s: float) -> None:
    assert 0.7 * erase_within_s < kept_s(keeping(erase_within_s)) <= 0.95 * erase_within_s


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, 1000 + 200 + 10),
        ({"retention.ms": "-1"}, float("inf")),
        ({"cleanup.policy": "compact"}, float("inf")),
        ({"cleanup.policy": "compact,delete"}, 1210),
    ],
)
def test_what_others_keep(changed: dict[str, str], kept: float) -> None:
    base = {
        "cleanup.policy": "delete",
        "retention.ms": "1000000",
        "segment.ms": "200000",
        "file.delete.delay.ms": "10000",
    }
    assert kept_s(base | changed) == kept


def test_kafkas_own_defaults_keep_for_too_long() -> None:
    week = str(ERASE_WITHIN_S * 1000)
    defaults = {"cleanup.policy": "delete", "retention.ms": week, "segment.ms": week, "file.delete.delay.ms": "60000"}
    assert kept_s(defaults) > ERASE_WITHIN_S
