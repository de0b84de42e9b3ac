"""Every metric of the gateway, with its meaning."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SESSIONS = Gauge("waybill_sessions", "Open sessions.")
SESSIONS_ENDED = Counter("waybill_sessions_ended", "Sessions that ended, by close code.", ["code"])
PUSHES = Counter("waybill_pushes", "Events written to a session for the first time: event × session.")
RESENDS = Counter("waybill_resends", "Events written again because no ack came in time.")
CURSOR_BREAKS = Counter(
    "waybill_cursor_breaks",
    "Cursors that are not where they should be. behind: the client went back behind its acks; ahead_of_head: it names "
    "more than there is, the store or the client was restored; ahead_of_record: its acks did not arrive; gap: Kafka "
    "brought a seq above the next one; reset: another event stands at that seq.",
    ["kind"],
)
CATCH_UP_READS = Counter("waybill_catch_up_reads", "Reads from Postgres for sessions that are behind.")
IGNORED_ACKS = Counter("waybill_ignored_acks", "Seqs in acks that are above the head or not visible.")
CLIENT_ERRORS = Counter("waybill_client_errors", "Error frames sent to clients, by code.", ["code"])
DROPPED_RECORDS = Counter("waybill_dropped_records", "Kafka records whose conversation has no local session.")
ACKS_WAITING = Gauge("waybill_acks_waiting", "Devices' acks and marks that Kafka has not confirmed yet.")
SENDS_WAITING = Gauge("waybill_sends_waiting", "Sends that wait for ingest.")
PUSH_SECONDS = Histogram(
    "waybill_push_seconds",
    "From the record's time in Kafka to the write to the first socket.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)

for _kind in ("behind", "ahead_of_head", "ahead_of_record", "gap", "reset"):
    CURSOR_BREAKS.labels(_kind)
