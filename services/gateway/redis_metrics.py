"""Metrics of what goes through Redis: presence, typing, kicks, rates."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

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

for _channel in ("typing", "sessions"):
    REDIS_DROPPED.labels(_channel)
for _result in ("told", "too_soon", "too_large"):
    TYPING.labels(_result)
