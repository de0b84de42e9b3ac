import pytest

from services.console.retention.ages import MOST_S, seconds, text
from shared.errors import BadRequestError


@pytest.mark.parametrize(
    ("written", "age_s"), [("90d", 7_776_000), ("12h", 43_200), ("1m", 60), ("36500d", MOST_S), ("1440m", 86_400)]
)
def test_ages(written: str, age_s: int) -> None:
    assert seconds(written) == age_s
    assert seconds(text(age_s)) == age_s


@pytest.mark.parametrize(
    "written", ["", "d", "0d", "-1d", "1.5d", "90", "90s", "1w", "36501d", "9999999999d", "٣d", "1d "]
)
def test_what_is_no_age(written: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        seconds(written)
    assert refused.value.field == "age"


def test_an_age_is_told_in_the_largest_unit_without_a_rest() -> None:
    assert [text(one) for one in (86_400, 90_000, 5_400, 61)] == ["1d", "25h", "90m", "1m"]
