"""Metrics of the receipts service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.receipts.store import Counted

RECEIPTS = Counter(
    "waybill_receipts",
    "What acks changed: `delivered` counts events × devices acked for the first time, `read` and `unread` marks taken.",
    ["kind"],
)
REFUSED = Counter(
    "waybill_receipts_refused",
    "Read marks refused, and acks (one per device and batch) beyond the head or of nothing visible, by reason.",
    ["reason"],
)
BATCH_RECORDS = Histogram(
    "waybill_receipts_batch_records",
    "Acks per transaction. Near the limit: the service is catching up.",
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
)
BATCH_SECONDS = Histogram(
    "waybill_receipts_batch_seconds",
    "Seconds to apply a batch, retries included.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
LAG_RECORDS = Gauge(
    "waybill_receipts_lag_records", "Acks in this process's partitions that are not applied yet. Ticks are that late."
)
LAG_SECONDS = Gauge(
    "waybill_receipts_lag_seconds", "Age of the oldest ack in the batch applied last, in seconds; 0 when idle."
)
PARTITIONS = Gauge("waybill_receipts_partitions", "Partitions of acks that this process reads.")
FENCED = Counter(
    "waybill_receipts_fenced",
    "Batches dropped because another process had moved the offsets. Normal after a rebalance.",
)
RESTARTED = Counter(
    "waybill_receipts_restarted",
    "Partitions read from their beginning, by reason: `new` has no stored offset, `out_of_range` one that Kafka lacks.",
    ["reason"],
)
STOPPED = Gauge(
    "waybill_receipts_stopped", "1 after too many acks could not be read: look at the topic, then restart the service."
)
LETTERS = Counter(
    "waybill_receipts_letters",
    "Dead letters of acks that were tried again, by what became of them: `sent` (applied) or `dead` (again).",
    ["outcome"],
)

KINDS = ("delivered", "read", "unread")
REASONS = ("stale", "beyond_head", "invisible")
for _kind in KINDS:
    RECEIPTS.labels(_kind)
for _reason in REASONS:
    REFUSED.labels(_reason)
ANNOUNCED = Counter(
    "waybill_receipts_announced",
    "Marks of members of large groups told to who watches: at most one per member and second.",
)

for _reason in ("new", "out_of_range"):
    RESTARTED.labels(_reason)
for _outcome in ("sent", "dead"):
    LETTERS.labels(_outcome)


def count(counted: Iterable[Counted]) -> None:
    """Count what a batch came to."""
    for one in counted:
        metric = RECEIPTS.labels(one.kind) if one.reason is None else REFUSED.labels(one.reason)
        metric.inc(one.amount)
