"""The relay's metrics."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from services.relay.lease import SHARDS

OLDEST_UNSENT = Gauge(
    "waybill_outbox_oldest_unsent_seconds",
    "Age of the oldest row of the outbox that Kafka has not confirmed; 0 if there is none. The relay's health.",
)
BACKLOG = Gauge(
    "waybill_outbox_backlog_rows",
    "Rows of the outbox that no cursor has passed, by shard; counted up to 10,000 each.",
    ["shard"],
)
DEAD_LETTERS = Gauge(
    "waybill_dead_letters",
    "Rows that could not be published, and records that a consumer could not process, by state: `parked` (refused, or "
    "waiting behind such a row), `dead`, `retrying`, and what became of dead ones: `sent`, `discarded`, `rewound`.",
    ["state"],
)
OLDEST_PARKED = Gauge(
    "waybill_relay_parked_oldest_seconds", "For how long the oldest parked row has been parked; 0 if there is none."
)
PUBLISHED = Counter(
    "waybill_relay_published",
    "Tries to publish a row that came to an end, by topic without its prefix (`other`: none of the outbox's) and "
    "result: `sent`, `late` (a dead letter behind its successors), `failed` (parked, to be tried again), `dead`.",
    ["topic", "result"],
)
PARKED_ROWS = Counter(
    "waybill_relay_parked_rows",
    "Rows that left the straight way: `failed` or `dead` themselves, or `waiting` behind one of their conversation.",
    ["outcome"],
)
ATTEMPTS = Counter(
    "waybill_relay_attempts",
    "Further tries of parked rows and dead letters, by what became of them.",
    ["outcome"],
)
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
    "Shards of this process that stand still because too many of their rows were refused; the log says why.",
)
LEASE_CHANGES = Counter(
    "waybill_relay_lease_changes", "Shards taken, given back, and lost to another relay.", ["change"]
)
FENCED_WRITES = Counter(
    "waybill_relay_fenced_writes",
    "Moves of a cursor, and results of parked rows, that were refused because another relay holds the shard by now.",
)

LETTER_STATES = ("dead", "retrying", "sent", "discarded", "rewound")
for _state in ("parked", *LETTER_STATES):
    DEAD_LETTERS.labels(_state).set(0)
for _shard in range(SHARDS):
    BACKLOG.labels(str(_shard))
_TOPICS = ("events.v1", "receipts.v1", "other")
for _topic in _TOPICS:
    for _result in ("sent", "late", "failed", "dead"):
        PUBLISHED.labels(_topic, _result)
for _outcome in ("failed", "dead", "waiting"):
    PARKED_ROWS.labels(_outcome)
for _outcome in ("sent", "failed", "dead"):
    ATTEMPTS.labels(_outcome)
for _kind in ("retriable", "permanent"):
    FAILED_BATCHES.labels(_kind)
for _change in ("taken", "given_back", "lost"):
    LEASE_CHANGES.labels(_change)


def published(topic: str, result: str, rows: int) -> None:
    """Count rows of a topic as outbox rows name it. What is none of the outbox's topics must not make a label."""
    _published(topic if topic in _TOPICS else "other", result).inc(rows)


_published = cache(PUBLISHED.labels)


JOURNAL_LAG = Gauge(
    "waybill_transition_lag_seconds",
    "Age of the oldest row of the outbox that a cursor has passed and that is not in the log of state changes; 0 if "
    "there is none.",
)
JOURNAL_ROWS = Counter("waybill_transition_rows", "Rows of the outbox that were brought into the log of state changes.")
JOURNAL_SKIPPED = Counter(
    "waybill_transition_skipped_rows",
    "Rows of the outbox that were dropped before they were in the log of state changes: it was far behind, or off.",
)

PARTITIONS_AHEAD = Gauge(
    "waybill_outbox_partitions_ahead", "Partitions of the outbox above the one that ids are drawn in."
)
PARTITIONS_BEHIND = Gauge(
    "waybill_outbox_partitions_behind",
    "Partitions of the outbox below that one. More than the retention in days: a row of the oldest is unresolved.",
)
PARTITION_CHANGES = Counter(
    "waybill_outbox_partition_changes", "Partitions of the outbox made, closed and dropped.", ["change"]
)
RETENTION_PUT_OFF = Counter(
    "waybill_relay_retention_put_off",
    "Steps of the retention that did not get a lock in time, by step. They are tried again; always: somebody holds it.",
    ["step"],
)
OLDEST_LETTER = Gauge(
    "waybill_dead_letter_oldest_seconds",
    "Age of the oldest dead letter that nobody has settled; 0 if there is none. Near its retention it will be lost.",
)
LETTERS_EXPIRED = Counter(
    "waybill_dead_letters_expired",
    "Dead letters forgotten after their retention, by state. `dead`, `retrying`: not settled by anybody, and logged.",
    ["state"],
)

BODIES_EXPIRED = Counter("waybill_bodies_expired", "Bodies erased by age, as the policies of retention say.")
UNVACUUMED = Gauge(
    "waybill_erasures_unvacuumed_seconds",
    "Age of the oldest erasure whose rows' old versions may still lie in Postgres; 0 if there is none. Near "
    "WAYBILL_ERASE_WITHIN_S: a transaction or a replication slot is held open for days.",
)
TOPIC_KEEPS = Gauge(
    "waybill_topic_keeps_seconds",
    "For how long a topic keeps a record at most, by topic without its prefix. Over WAYBILL_ERASE_WITHIN_S: run "
    "`waybill migrate`.",
    ["topic"],
)

for _change in ("made", "closed", "dropped"):
    PARTITION_CHANGES.labels(_change)
for _step in (
    "make",
    "close",
    "summarise",
    "skip_journal",
    "drop",
    "drop_deliveries",
    "forget",
    "letters",
    "make_days",
    "drop_days",
    "revocations",
    "vacuum",
):
    RETENTION_PUT_OFF.labels(_step)
for _state in LETTER_STATES:
    LETTERS_EXPIRED.labels(_state)
