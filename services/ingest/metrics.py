"""Metrics of ingest."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.errors import ERRORS

SENDS = Counter(
    "waybill_sends",
    "Sends by what they were answered: new, duplicate, or an error's code.",
    ["result"],
)
BATCH_SIZE = Histogram(
    "waybill_ingest_batch_size",
    "Sends per transaction. Near the limit all the time: more lanes or another process are needed.",
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
)
BATCH_SECONDS = Histogram(
    "waybill_ingest_batch_seconds",
    "Time of one transaction of a lane, with its wait for locks and the commit.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
QUEUE_DEPTH = Gauge("waybill_ingest_queue_depth", "Sends that wait or are being written.")
BISECTED = Counter(
    "waybill_ingest_bisected", "Batches that Postgres refused as a whole and that were split to find the send at fault."
)
MODERATION = Counter(
    "waybill_moderation_requests",
    "Calls of the moderation hook by how they ended: answered, or away (time-out, refused, no valid answer).",
    ["result"],
)
OUTBOX_IDS_LEFT = Gauge(
    "waybill_outbox_ids_left", "Ids left in the outbox partitions that there are. Falling to 0: make partitions."
)
COUNTED_LATE = Counter(
    "waybill_ingest_counted_late",
    "Buckets of events that the walk through all conversations counted, and not the writer that filled them.",
)

RESULTS = ("new", "duplicate", *ERRORS)
for _result in RESULTS:
    SENDS.labels(_result)
for _result in ("answered", "away"):
    MODERATION.labels(_result)
