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

_GATEWAY = """\
a: one conversation of 500 members gets 100 messages a second. b: 200 conversations of 5 get 2,000. c: a flood to 500
members of one conversation, 100 messages ahead of what has arrived, which is less than half of a session's window. d:
10,000 sessions and no message; memory is what the server's processes have more than before. e: 5,000 sessions are cut
off, their 1,000 conversations get 10 messages each, and all come back at once; the time is until the last one has all.

CPU is that of the gateway's processes alone, by the events that came to sockets. Latency is from just before a record
is written to Kafka until the client has parsed the frame. Load client, broker and gateway share the cores, and on
loopback who sends pays for a part of what the receiver's kernel does.

Equal on both sides: the load client, the broker, the topic, what the records hold, a fresh server for each cell, and
nothing of the other side running meanwhile.

Not equal, to the peer's advantage: it has no acks, no window, no receipts and no store, and lets any valid token into
any conversation. Waybill takes an ack from every session each 50 events or 200 ms, folds it, writes it to Kafka and
pushes the receipts that follow; ingest, relay, receipts and Postgres work on that on the same cores. The peer is
compiled and uses both cores, a gateway's process one. In e it answers from memory, which a restart empties; Waybill's
events went through Postgres, where a restart finds them.

Not equal, to Waybill's advantage: the peer's library can also gather a client's messages for some milliseconds and
write them as one frame. That multiplies its rate in c and costs it latency; in the product it belongs to the paid
edition, and here it is off. Waybill gathers what one turn of its loop brings, always.
"""

_GATEWAY_SHADOW = """\
In a, b and c the records go straight to Kafka, for Waybill as for its peer. The benchmark copies Waybill's into
Postgres as they come, so that a session that falls behind finds them there, at most {behind:.0f} ms after Kafka had
them; in life they are there before. That work takes a part of the cores from Waybill's side alone.
"""

_GATEWAY_BACK = """\
{share:.0f} % of the sessions that came back in e needed no read of events of their own from Postgres.
"""

_GATEWAY_SEND = """\
Through everything, 1,000 messages a second sent by the members of 200 conversations of 5 over their sockets: to the
other members' sockets, through ingest, Postgres, relay and Kafka, p50 {send_p50_ms:.1f} ms and p99
{send_p99_ms:.1f} ms; to `sent`, p99 {sent_p99_ms:.1f} ms.
"""

_GATEWAY_STALLED = """\
A member that says `hello` and then never reads, while 200 others of its conversation get at least 20 MiB each, adds
{stalled_kib:.0f} KiB to the gateway's memory; the kernel holds {stalled_kernel_kib:.0f} KiB for it.
"""

_RECEIPTS_RATE = """\
One process drains {acks:,.0f} acks from 64 partitions; the reference drains the same topic for {seconds:.0f} s. All
of 2,000 conversations of 4 are active at once: any of them gets 1 to 3 messages, each device of each member (6, half
of the members have two) acks them as one range or, one time in ten, later together with the next ones; a quarter of
the members read up to the head. Nothing to fold: the same over 30,000 conversations, where next to no device acks
twice.

CPU is that of the process and of Postgres together, of which Postgres takes {postgres:.1f} s per 1 M acks for Waybill
and {peer_postgres:.1f} for the reference.

Not equal, to the reference's advantage: it keeps the highest seq of an ack and no ranges, so that it cannot see a
hole; it knows no membership, no head and no `unread`; it neither writes a transition nor a record that announces a
mark ({announced:,.0f} records of Waybill in a turn), nor are its offsets in the transaction. Equal: Kafka, Postgres
with every commit synced, the topic, uvloop, prepared statements.
"""

_RECEIPTS_TICKS = """\
The times are from the `ack` frame's write at one member's socket to the `receipt` frame's read at the other's, at
{rate:.0f} acks a second over 50 direct chats of 20 users. Both sides have the same gateway; between its two records
in Kafka stands Waybill's receipts, outbox and relay, or the reference, which upserts and then writes the receipt
straight to Kafka: one hop less, and the receipt is lost if the process dies in between.
"""

_RECEIPTS_GROWTH = """\
1 M messages leave {total:,.0f} MiB in Postgres: {tables}. Extrapolated from {messages:,.0f} messages of 1 to 110
characters, 300 a second over 200 groups of 4 whose members are all connected on one device, ack ten times a second
and read a quarter; with indexes. The outbox and the log of transitions are dropped by their retention. Transitions
per message: {transitions}. Rows that waited for a vacuum at the end: {dead}.
"""

_TRANSITIONS = """\
{rate:.0f} messages a second, socket to socket through every service, over {chats:.0f} direct chats whose members are
all connected; each turn on a fresh Waybill. CPU is that of the services and of Postgres until all is delivered and
logged, what they use while nothing comes included, on both sides.

Rows per message: {rows}. What receipts note of acks is there without the log, too ({without:,.0f} bytes a message).
"""


def words_on(result: Result) -> list[str]:
    """A few paragraphs, none for a benchmark that nothing is known about."""
    write = _WRITERS.get(str(result["name"]))
    return [] if write is None else [" ".join(part.split()) for part in write(result).split("\n\n") if part]


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


def _on_gateway(result: Result) -> str:
    waybill = at(result, "waybill")
    turns = cast("Mapping[str, list[Mapping[str, float]]]", result["turns"])["waybill"]
    behind = [turn[name] for turn in turns for name in turn if name.endswith("_postgres_behind_ms") and turn[name]]
    parts = [_GATEWAY] if "peer" in result else []
    if behind:
        parts.append(_GATEWAY_SHADOW.format(behind=max(behind)))
    if "e_without_postgres" in waybill:
        parts.append(_GATEWAY_BACK.format(share=waybill["e_without_postgres"] * 100))
    parts += [
        text.format(**waybill)
        for text, needs in ((_GATEWAY_SEND, "send_p99_ms"), (_GATEWAY_STALLED, "stalled_kib"))
        if needs in waybill
    ]
    return "\n".join(parts)


def _on_receipts(result: Result) -> str:
    settings, waybill, peer = at(result, "settings"), at(result, "waybill"), at(result, "peer")
    parts = []
    if "rate_s" in peer:
        parts.append(
            _RECEIPTS_RATE.format(
                acks=settings["acks"],
                seconds=settings["seconds"],
                postgres=waybill["postgres_cpu_s_per_million"],
                peer_postgres=peer["postgres_cpu_s_per_million"],
                announced=waybill["rows_announced"],
            )
        )
    if "p50_ms" in peer:
        parts.append(_RECEIPTS_TICKS.format(rate=settings["rate"]))
    if growth := at(result, "growth"):
        told = {
            name: at(result, "growth", name) for name in ("mib_per_million", "transitions_per_message", "dead_rows")
        }
        tables = {name: value for name, value in told["mib_per_million"].items() if value}
        parts.append(
            _RECEIPTS_GROWTH.format(
                total=growth["mib_per_million_in_all"],
                tables=_listed(tables),
                messages=settings["messages"],
                transitions=_listed(told["transitions_per_message"]),
                dead=_listed(told["dead_rows"]) or "none",
            )
        )
    return "\n".join(parts)


def _on_transitions(result: Result) -> str:
    settings = at(result, "settings")
    figures = at(result, "waybill")
    kinds = {name.removeprefix("rows_"): figures[name] for name in figures if name.startswith("rows_")}
    return _TRANSITIONS.format(
        rate=settings["rate_s"],
        chats=settings["chats"],
        rows=_listed(kinds),
        without=at(result, "without")["log_bytes"],
    )


def _listed(figures: Mapping[str, float]) -> str:
    return ", ".join(
        f"`{name}` {value:,.0f}" if value >= 10 else f"`{name}` {value:g}" for name, value in figures.items()
    )


_WRITERS: dict[str, Callable[[Result], str]] = {
    "send": _on_send,
    "e2e": _on_e2e,
    "relay": _on_relay,
    "gateway": _on_gateway,
    "receipts": _on_receipts,
    "transitions": _on_transitions,
}
