"""The relay's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OLDEST_UNSENT = Gauge(
    "waybill_outbox_oldest_unsent_seconds",
    "Age of the oldest row of the outbox that Kafka has not confirmed; 0 if there is none. The relay's health.",
)
DEAD_LETTERS = Gauge("waybill_dead_letters", "Records that could not be published, by state.", ["state"])
PUBLISHED = Counter("waybill_relay_published", "Records that Kafka confirmed, by topic without its prefix.", ["topic"])
BATCH_ROWS = Histogram(
    "waybill_relay_batch_rows",
    "Rows in a batch handed to Kafka.",
    buckets=(1, 2, 5, 10, 25, 50, 100, 250, 500, 1000),
)
DELIVERY_SECONDS = Histogram(
    "waybill_relay_delivery_seconds",
    "From handing a batch to the Kafka client until it is confirmed.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
FAILED_BATCHES = Counter(
    "waybill_relay_failed_batches",
    "Batches that Kafka did not confirm; each ends its client. `retriable` ones are sent again.",
    ["kind"],
)
SHARDS_HELD = Gauge("waybill_relay_shards", "Shards that this process holds.")
STOPPED_SHARDS = Gauge(
    "waybill_relay_stopped_shards",
    "Shards of this process that stand still at a row that can never be published; the log names it.",
)
LEASE_CHANGES = Counter(
    "waybill_relay_lease_changes", "Shards taken, given back, and lost to another relay.", ["change"]
)
FENCED_WRITES = Counter(
    "waybill_relay_fenced_writes", "Moves of a cursor that were refused because another relay holds the shard by now."
)

for _state in ("parked", "dead"):
    DEAD_LETTERS.labels(_state).set(0)
for _topic in ("events.v1", "receipts.v1"):
    PUBLISHED.labels(_topic)
for _kind in ("retriable", "permanent"):
    FAILED_BATCHES.labels(_kind)
for _change in ("taken", "given_back", "lost"):
    LEASE_CHANGES.labels(_change)
