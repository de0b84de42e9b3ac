"""What to know about a result's figures, in a few honest sentences. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Result = Mapping[str, object]

_SEND = """\
{waiting:,.0f} sends wait for their answer at any time, on both sides, over {chats:.0f} conversations: {in_flight:.0f}
requests of {batch:.0f}, which is how a busy gateway forwards. At a full load the latencies follow from the rates. What
each side does to deliver goes on meanwhile, on the same cores.

Both have {pool:.0f} connections. Waybill's ingest writes through 4 of them and keeps the others for reads; the
reference writes through all but the dispatcher's one.

The reference is measured as such code is written: begin, number, message, outbox row, commit. Folded into one statement
it saves four of five round trips, and Waybill's lead is {at_once} in place of {ratio}. What is left of the lead is the
price of a commit, a row lock and index updates for each message instead of for each batch.

When every send is a request of its own, HTTP in Python costs more than either writer, and Waybill's rate is {single}
the reference's. Group commit lives on sends that come together, and the gateway's batches bring them together.

Written is not delivered: when the time was over, {waybill_unsent:,.0f} of Waybill's events and {peer_unsent:,.0f} of
the reference's messages (pushed after the commit: {push_unsent:,.0f}) were not yet in Kafka. The reference's rate would
be lower if it had to keep up.
"""

_E2E = """\
{rate_s:.0f} messages a second in an open loop over {chats:.0f} conversations of {users:.0f} users. Waybill is measured
from socket to socket through every service. The reference is measured in its best case, within one process from its
commit to a Kafka consumer: no socket, no HTTP, no gateway.

With the scan alone the time is that of the scan: any moment within 3 s.

**The after-commit push, honestly.** While nothing fails, it has no scan to wait for: p50 {push_p50:.1f} ms and p99
{push_p99:.1f} ms from its commit to Kafka. The part of Waybill's way that is most like it, from `sent` read to `event`
read, took p50 {pushed_p50:.1f} ms and p99 {pushed_p99:.1f} ms, with the gateway and both sockets in it. Speed is no
reason to prefer Waybill's relay to it. What the push does not have is order: two pushes overtake each other, and a
failed one waits for the scan while later ones go out. A process that dies between commit and push leaves the message to
the scan, seconds later and behind its successors. And each message costs one more update of the hot table.

In a turn of the push {push_disordered:.0f} messages came to Kafka behind a later one of their conversation and
{push_repeated:.0f} came twice; with the scan alone {peer_disordered:.0f} and {peer_repeated:.0f}; at Waybill's sockets
{disordered:.0f} and {repeated:.0f}.
"""

_RELAY = """\
A backlog of {backlog:,.0f} rows is drained by one process; then transactions of ten rows come at 1,000 and at 5,000
rows a second, over 1,000 conversations and 64 partitions; then nothing comes. p50 and p99 ms without a rate are those
at 1,000 rows a second, from a commit read by its writer to the record read by a consumer.

CPU is what the relay's processes and Postgres use together: Waybill's queries there, Debezium's walsender. The
broker, the writers and the consumer share the machine's cores with both sides and are not counted.

Debezium runs in Kafka Connect standalone, with a configuration made for an outbox of this load. Tuned for latency it
polls every millisecond and does not linger; it pays for that in CPU.

Not counted for Debezium: its walsender reads all that the server writes, here the outbox alone. Not counted for
Waybill: the writers' locks on shards. Waybill notes where in Kafka each row lies, Debezium doesn't.
"""

_DEEP = """\
A backlog of {rows:,.0f} rows in one go: {drain_rows_s:,.0f} rows a second; memory {rss_first_mb:.0f} MiB in the first
quarter of the time, {rss_last_mb:.0f} in the last one, {rss_mb:.0f} at most.
"""


def words_on(result: Result) -> list[str]:
    """A few paragraphs, none for a benchmark that nothing is known about."""
    write = _WRITERS.get(str(result["name"]))
    return [] if write is None else [" ".join(part.split()) for part in write(result).split("\n\n")]


def at(result: Result, *path: str) -> dict[str, float]:
    """The figures at that place, empty if there are none."""
    found: object = result
    for name in path:
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return cast("dict[str, float]", found)


def as_times(value: float | None) -> str:
    """A ratio as people read it."""
    if value is None:
        return "?"
    return f"{value:,.0f} ×" if value >= 100 else f"{value:.1f} ×"


def _on_send(result: Result) -> str:
    settings = at(result, "settings")
    return _SEND.format(
        waiting=settings["in_flight"] * settings["batch"],
        **{name: settings[name] for name in ("chats", "in_flight", "batch", "pool")},
        ratio=as_times(at(result, "ratio")["rate_s"]),
        at_once=as_times(at(result, "ratio_at_once")["rate_s"]),
        single=as_times(at(result, "single_requests", "ratio")["rate_s"]),
        waybill_unsent=at(result, "waybill")["unsent_at_end"],
        peer_unsent=at(result, "peer")["unsent_at_end"],
        push_unsent=at(result, "peer_after_commit")["unsent_at_end"],
    )


def _on_e2e(result: Result) -> str:
    settings, waybill = at(result, "settings"), at(result, "waybill")
    peer, push = at(result, "peer"), at(result, "peer_after_commit")
    return _E2E.format(
        **{name: settings[name] for name in ("rate_s", "chats", "users")},
        push_p50=push["p50_ms"],
        push_p99=push["p99_ms"],
        pushed_p50=waybill["sent_to_event_p50_ms"],
        pushed_p99=waybill["sent_to_event_p99_ms"],
        push_disordered=push["disordered"],
        push_repeated=push["repeated"],
        peer_disordered=peer["disordered"],
        peer_repeated=peer["repeated"],
        disordered=waybill["disordered"],
        repeated=waybill["repeated"],
    )


def _on_relay(result: Result) -> str:
    deep = at(result, "deep")
    long = "\n" + _DEEP.format(**deep) if deep else ""
    return _RELAY.format(backlog=at(result, "settings")["backlog"]) + long


_WRITERS: dict[str, Callable[[Result], str]] = {"send": _on_send, "e2e": _on_e2e, "relay": _on_relay}
