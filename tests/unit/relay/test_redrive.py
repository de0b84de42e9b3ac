from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.relay.redrive import Window

YEAR_2 = datetime.fromisoformat("0002-01-01")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text", ["", "2:00-4:00", "24:00-01:00", "02:00", "02:00-04:60", "02:00-02:00", "02:00 - 04:00"]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HH:MM-HH:MM|empty"):
        Window.parse(text)


@pytest.mark.parametrize(
    ("window", "now", "begun"),
    [
        ("02:00-04:00", "2026-11-29T01:59:59", None),
        ("02:00-04:00", "2026-11-29T02:00:00", "2026-11-29T02:00:00"),
        ("02:00-04:00", "2026-11-29T04:00:00", None),
        ("23:00-01:00", "2026-11-29T23:30:00", "2026-11-29T23:00:00"),
        ("23:00-01:00", "2026-11-30T00:30:00", "2026-11-29T23:00:00"),
        ("23:00-01:00", "2026-11-30T01:00:00", None),
    ],
)
def test_when_a_window_began(window: str, now: str, begun: str | None) -> None:
    assert Window.parse(window).begun(at(now)) == (None if begun is None else at(begun))


@given(st.integers(0, 1439), st.integers(0, 1439), st.datetimes(min_value=YEAR_2, timezones=st.just(UTC)))
def test_a_window_is_as_long_as_it_says(begins: int, ends: int, now: datetime) -> None:
    if begins == ends:
        return
    window = Window.parse(f"{begins // 60:02}:{begins % 60:02}-{ends // 60:02}:{ends % 60:02}")
    begun = window.begun(now)
    minute = now.hour * 60 + now.minute
    inside = begins <= minute < ends if begins < ends else not ends <= minute < begins
    assert (begun is not None) == inside
    if begun is not None:
        assert timedelta(0) <= now - begun < timedelta(minutes=(ends - begins) % 1440)
