"""Ages as people write them: `90d`, `12h`, `30m`. Pure."""

from __future__ import annotations

import re

from shared.errors import BadRequestError

_AGE = re.compile(r"\A([1-9][0-9]{0,8})([dhm])\Z")
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60}

LEAST_S = 60
MOST_S = 100 * 365 * 86_400


def seconds(text: str) -> int:
    """An age in seconds. Raises `BadRequestError`."""
    found = _AGE.match(text)
    if found is None or int(found[1]) * _SECONDS[found[2]] > MOST_S:
        raise BadRequestError("expected days, hours or minutes, such as 90d, 12h or 30m, up to 100 years", field="age")
    return int(found[1]) * _SECONDS[found[2]]


def text(age_s: float) -> str:
    """Seconds in the largest unit that leaves no rest; in minutes, cut, if none does."""
    whole = int(age_s)
    unit = next((unit for unit, size in _SECONDS.items() if whole % size == 0), "m")
    return f"{whole // _SECONDS[unit]}{unit}"
