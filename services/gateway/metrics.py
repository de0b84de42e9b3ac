"""Every metric of the gateway, with its meaning."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SESSIONS = Gauge("waybill_sessions", "Sessions on this gateway, greeted or not.", multiprocess_mode="livesum")
SESSIONS_BY_STATE = Gauge(
    "waybill_sessions_by_state",
    "opening: no `hello` yet; listing: conversations are being told; live: takes events as they come; behind: takes "
    "what it missed; stalled: behind, and its window or buffer is full. Counted every few seconds.",
    ["state"],
    multiprocess_mode="livesum",
)
SESSIONS_ENDED = Counter("waybill_sessions_ended", "Sessions that ended, by close code.", ["code"])
PUSHES = Counter("waybill_pushes", "Events written to a session for the first time: event × session.")
WATCH_RECEIPTS = Counter(
    "waybill_watch_receipts", "Members' marks written to sessions that watch a group: member × session."
)
RESENDS = Counter("waybill_resends", "Events written again because no ack came in time.")
CURSOR_BREAKS = Counter(
    "waybill_cursor_breaks",
    "Cursors that are not where they should be. behind: the client went back behind its acks; ahead_of_head: it names "
    "more than there is, the store or the client was restored; ahead_of_record: its acks did not arrive; gap: Kafka "
    "brought a seq above the next one; reset: another event stands at that seq.",
    ["kind"],
)
GAP_EVENTS = Counter("waybill_gap_events", "Seqs that were missing in what Kafka brought.")
CATCH_UP_READS = Counter("waybill_catch_up_reads", "Reads of events from Postgres for sessions that are behind.")
CATCH_UP_RING = Counter("waybill_catch_up_ring", "Times that a session that was behind was served from a ring.")
CATCH_UP_WAITING = Gauge(
    "waybill_catch_up_waiting", "Reads that are under way or wait for their turn.", multiprocess_mode="livesum"
)
BEHIND_SECONDS = Histogram(
    "waybill_behind_seconds",
    "How long a session that fell behind had been so when it was counted as live again, to a few seconds.",
    buckets=(1, 2, 5, 10, 30, 60, 300),
)
WINDOW_STALLS = Counter(
    "waybill_window_stalls",
    "Times that a live session fell behind: its window or its buffer was full, or it missed something.",
)
RING_BYTES = Gauge("waybill_ring_bytes", "What the rings of recent events hold.", multiprocess_mode="livesum")
ROOMS = Gauge(
    "waybill_rooms",
    "Conversations with local sessions, or kept ready for those who come back.",
    multiprocess_mode="livesum",
)
DROPPED = Counter(
    "waybill_dropped", "Sessions that were given up, by reason. too_slow: more waited for it than is held.", ["reason"]
)
DRAINED = Counter("waybill_drained_sessions", "Sessions that were sent elsewhere because this gateway ends.")
REPLACED = Counter("waybill_replaced_sessions", "Sessions that ended for a newer one of the same device.")
REVOKED = Counter("waybill_revoked_sessions", "Sessions that ended because their token was revoked.")
CLIENT_FRAMES = Counter("waybill_client_frames", "Frames from clients, by the rate that they count against.", ["kind"])
RECORDS = Counter("waybill_records", "Records of events and receipts read from Kafka.")
SOCKET_BYTES = Counter(
    "waybill_socket_bytes", "Bytes of frames, by direction: in from clients, out to them.", ["direction"]
)
IGNORED_ACKS = Counter("waybill_ignored_acks", "Seqs in acks that are above the head or not visible.")
CLIENT_ERRORS = Counter("waybill_client_errors", "Error frames sent to clients, by code.", ["code"])
DROPPED_RECORDS = Counter("waybill_dropped_records", "Kafka records whose conversation has no local session.")
ACKS_WAITING = Gauge(
    "waybill_acks_waiting", "Devices' acks and marks that Kafka has not confirmed yet.", multiprocess_mode="livesum"
)
SENDS_WAITING = Gauge("waybill_sends_waiting", "Sends that wait for ingest.", multiprocess_mode="livesum")
PUSH_SECONDS = Histogram(
    "waybill_push_seconds",
    "From the record's time in Kafka to the write to the first socket.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
PUSH_COMMIT_SECONDS = Histogram(
    "waybill_push_commit_seconds",
    "From an event's commit to the write to the first socket. It compares two machines' clocks.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
REDIS_UP = Gauge("waybill_redis_up", "1 while Redis does what it is asked, else 0.", multiprocess_mode="livemin")
REDIS_OUTAGES = Counter("waybill_redis_outages", "Times that Redis was lost, or not there at the start.")
REDIS_BAD_MESSAGES = Counter(
    "waybill_redis_bad_messages", "Messages from Redis that could not be read, or whose handling failed."
)
REDIS_DROPPED = Counter(
    "waybill_redis_dropped",
    "Items for other gateways that were dropped because Redis was away or the queue was full, by channel.",
    ["channel"],
)
PRESENCE_WATCHED = Gauge(
    "waybill_presence_watched", "Users whose presence some local session wants to know.", multiprocess_mode="livesum"
)
PRESENCE_FRAMES = Counter("waybill_presence_frames", "Presence frames written to sessions.")
PRESENCE_CHECKS = Counter("waybill_presence_checks", "Reads from Postgres of who shares a conversation with whom.")
TYPING = Counter(
    "waybill_typing",
    "Typing frames from local sessions. told: to the others; too_soon: the session just said so; too_large: the "
    "conversation has too many local sessions.",
    ["result"],
)
RATE_LIMITED = Counter(
    "waybill_rate_limited",
    "Frames that were refused, by what they ask for and by whose rate was used up: the session's, the user's in this "
    "process, or the user's over all gateways (shared).",
    ["kind", "scope"],
)
SWEEP_FINDS = Counter(
    "waybill_sweep_finds",
    "What Postgres had, and Kafka or Redis had not brought in time. event: a conversation's head; change: a membership "
    "or a conversation; receipt; session: a device has a newer one.",
    ["kind"],
)
SWEEP_ROWS = Counter("waybill_sweep_rows", "Rows of the outbox that the sweep read.")
TRANSITIONS_DROPPED = Counter(
    "waybill_transitions_dropped",
    "Entries of the log of state changes that were given up: too many waited to be written.",
)
LETTERS_DROPPED = Counter(
    "waybill_letters_dropped",
    "Records that could not be read and are not on the desk of dead letters either: too many waited, or Postgres "
    "refused them. They are in the dead-letter topic.",
)
HANDSHAKES = Counter("waybill_handshakes", "Connections to the sockets' port, by how they were answered.", ["status"])
# Both have labels: without one, each child would keep a zero in its own file, beside the parent's figure.
PROCESSES = Gauge(
    "waybill_gateway_processes",
    "Processes of a gateway that has several: up, or down.",
    ["state"],
    multiprocess_mode="livesum",
)
PROCESS_ENDS = Counter(
    "waybill_gateway_process_ends",
    "Processes of a gateway that ended unasked. ended: by itself; hung: killed, it answered no question any more; "
    "not_up: killed, it never said where its health is; not_started: the system had no room for it.",
    ["how"],
)

for _kind in ("behind", "ahead_of_head", "ahead_of_record", "gap", "reset"):
    CURSOR_BREAKS.labels(_kind)
for _state in ("opening", "listing", "live", "behind", "stalled"):
    SESSIONS_BY_STATE.labels(_state)
for _rate in ("frames", "sends", "pulls", "creates", "presence"):
    CLIENT_FRAMES.labels(_rate)
for _direction in ("in", "out"):
    SOCKET_BYTES.labels(_direction)
DROPPED.labels("too_slow")
for _channel in ("typing", "sessions"):
    REDIS_DROPPED.labels(_channel)
for _result in ("told", "too_soon", "too_large"):
    TYPING.labels(_result)
for _find in ("event", "change", "receipt", "session"):
    SWEEP_FINDS.labels(_find)
