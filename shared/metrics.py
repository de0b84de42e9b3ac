"""Metrics that every service has. Each service's own are in its ``metrics.py``, the one place that names them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

LOOP_LAG = Gauge(
    "waybill_loop_lag_seconds",
    "How late the event loop woke up last, in seconds; over 0.1: it is blocked.",
    # Where several processes make one figure: that of the worst.
    multiprocess_mode="livemax",
)
LOOP_ERRORS = Counter(
    "waybill_loop_errors",
    "Times that a background loop met an error and went on after a delay, by loop.",
    ["loop"],
)
BAD_RECORDS = Counter(
    "waybill_bad_records",
    "Kafka records that could not be read and went to the dead-letter topic, by source topic.",
    ["topic"],
)
