"""Every metric of the console, with its meaning."""

from __future__ import annotations

from prometheus_client import Counter

LOOKS = Counter(
    "waybill_console_looks", "Times that the console asked a service for its health, by what it said.", ["status"]
)

for _status in ("ok", "failing", "away"):
    LOOKS.labels(_status)
