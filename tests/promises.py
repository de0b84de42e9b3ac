"""Every promise that Waybill makes: I1 to I12, and the lines of the public contracts.

A test claims promises with ``@pytest.mark.promise("I4", "protocol.3.hello")``; tests/unit/test_promises.py checks both
ways that the claims and this list agree. ``later``: why no test can claim it yet.
"""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    """``text``: what a user may rely on. ``later``: the reason why it is not kept yet, or None."""

    text: str
    later: str | None = None


_TRACE = "comes with the trace command"
_PROOF = "comes with the proof's drills"

PROMISES: dict[str, Promise] = {
    # The invariants.
    "I1": Promise("A send is acknowledged only after its event and its outbox row are committed in one transaction."),
    "I2": Promise("The same client_msg_id yields one event, however often and however concurrently it is sent."),
    "I3": Promise("seq is dense per conversation and is the only order."),
    "I4": Promise("Every committed event reaches Kafka at least once, in seq order once repeats are dropped."),
    "I5": Promise("One event that cannot be published never blocks another conversation."),
    "I6": Promise("A session receives each event once per acknowledged cursor, in seq order, with no gap."),
    "I7": Promise("A device that was offline or went back ends with the same timeline as every other device."),
    "I8": Promise("Delivered and read never go back by a late, repeated or reordered ack."),
    "I9": Promise("Recall, edit, delete, membership changes and notices are events with a seq of their own."),
    "I10": Promise("The Kafka, Redis and gateway tiers hold no truth."),
    "I11": Promise("For any event, one command tells its way and each attempt.", _TRACE),
    "I12": Promise("Nobody reads or writes a conversation that they are not a member of at that seq."),
    # 1. Words.
    "protocol.1.ids": Promise("Ids are checked, UUIDs are read in any case and written in lower case."),
    "protocol.1.times": Promise("Times are RFC 3339 UTC with microseconds, from the server."),
    "protocol.1.body_value": Promise("A body comes back as the same JSON value: digits, strings, order of names."),
    "protocol.1.body_refused": Promise("A name given twice, NUL, a lone surrogate, nesting over 64 are bad_request."),
    "protocol.1.body_size": Promise("A body has at most 64 KiB."),
    # 2. Who is who.
    "protocol.2.token": Promise("Tokens: none, expired, of the future, without exp, alg none, wrong key are refused."),
    "protocol.2.jwks": Promise("A JWKS from a file or URL is cached and rotated."),
    "protocol.2.scopes": Promise("A user acts as itself, a service as any sender, the gateway with its user's rights."),
    "protocol.2.hello_token": Promise("A header token beats the hello's; another device claim closes 4403."),
    "protocol.2.expiry": Promise("`expiring` comes before exp, 4401 at exp plus the leeway."),
    "protocol.2.command": Promise("`waybill token` mints a token for local use."),
    # 3. The socket.
    "protocol.3.upgrade": Promise("Subprotocol waybill.v1 or none; others 400; no deflate."),
    "protocol.3.hello": Promise(
        "The first frame is hello, within its time; the answer is welcome, conversation …, listed."
    ),
    "protocol.3.hello_sync": Promise("full starts at the server's record of the device, live at the head."),
    "protocol.3.hello_cursors": Promise("A cursor in hello is where pushing starts, and an ack of all up to it."),
    "protocol.3.hello_since": Promise(
        "`since` limits the listing to what is named or changed; the rest stays subscribed."
    ),
    "protocol.3.listing_order": Promise("Conversations with unread events come first, newest first."),
    "protocol.3.peer_receipt": Promise(
        "The frame of a direct chat is followed by the peer's receipt, if there is one."
    ),
    "protocol.3.bad_frame": Promise("A bad frame gets bad_request with field, and the session goes on."),
    "protocol.3.frame_size": Promise("A frame over the limit closes 1009; a hello may have 1 MiB."),
    "protocol.3.heartbeat": Promise("The server pings; two without an answer close 4408."),
    "protocol.3.ping": Promise("ping is answered by pong."),
    "protocol.3.send": Promise("send is answered by sent or error with its rid."),
    "protocol.3.send_types": Promise("All seven types, each with the fields that it needs."),
    "protocol.3.roles": Promise("The table of roles and conflicts."),
    "protocol.3.create": Promise("create: direct is idempotent, a group by its id; the creator is added."),
    "protocol.3.ack": Promise("ack names ranges; what is not visible or above the head is ignored and counted."),
    "protocol.3.read": Promise("read and unread are answered by a receipt, with the present marks when refused."),
    "protocol.3.pull": Promise("pull is answered by a page; next passes over what is not visible."),
    "protocol.3.settings": Promise("settings is answered by settings, and told to the user's other devices at once."),
    "protocol.3.listed_totals": Promise("listed tells what is unread in all, if all was listed."),
    "protocol.3.token_frame": Promise("token renews the session; another sub closes 4401."),
    "protocol.3.watch": Promise("watch brings other members' receipts of a group: those so far, then changes, folded."),
    "protocol.3.typing": Promise("typing is told to the others."),
    "protocol.3.presence": Promise("presence tells who is online."),
    "protocol.3.event_everywhere": Promise("An event goes to every session of every member who may see it."),
    "protocol.3.conversation_frame": Promise("A conversation frame comes when one is added, leaves, or it changes."),
    "protocol.3.left_conversation": Promise("One that the user left is listed while the cursor is below its end."),
    "protocol.3.resend": Promise("What is not acked in time is sent again, doubling, then 4408."),
    "protocol.3.window": Promise("At most `window` events of a session are unacknowledged."),
    "protocol.3.cursor_ahead": Promise("A cursor above the head is answered with the true head."),
    "protocol.3.reset": Promise("Another event id at a cursor is answered with reset."),
    "protocol.3.hidden_edit": Promise("An edit of what a member may not see comes with body null."),
    "protocol.3.edited_by": Promise("What was read tells edited_by, recalled_by, deleted_by."),
    "protocol.3.delete": Promise("delete erases the body and those of its edits for every read."),
    "protocol.3.recall": Promise("recall hides the same from every read."),
    "protocol.3.erase_within": Promise("Kafka and the outbox forget a deleted body within erase_within."),
    "protocol.3.session_number": Promise("A newer session of a device closes the older one with 4409."),
    "protocol.3.close_codes": Promise("The close codes mean what the table says."),
    "protocol.3.reconnect": Promise("A draining server says reconnect with after_ms and closes 4503."),
    "protocol.3.jitter": Promise("Clients reconnect after a random time up to min(30 s, 0.5 s · 2ⁿ)."),
    # 4. Errors.
    "protocol.4.problem": Promise("HTTP errors are problem JSON with code, field and retry_after_ms."),
    "protocol.4.indefinite": Promise("timeout and unavailable mean: send again with the same client_msg_id."),
    "protocol.4.stranger": Promise("A stranger gets the same not_found as for what is not there."),
    # 5. Delivered and read.
    "protocol.5.delivered": Promise("delivered_seq: everything visible up to it is on at least one device."),
    "protocol.5.read_mark": Promise("A pair (version, seq) is taken if and only if it is larger."),
    "protocol.5.read_refused": Promise("A mark beyond the head or on what is not visible is refused and counted."),
    "protocol.5.read_unread_apart": Promise("Reading implies nothing about delivered, and the other way round."),
    "protocol.5.receipt_goes_to": Promise(
        "A receipt goes to all sessions of the user and to the peer of a direct chat."
    ),
    # 6. HTTP.
    "protocol.6.events": Promise("POST /v1/events: results in order, 201 new, 200 known, one bad item fails alone."),
    "protocol.6.conversations": Promise("POST /v1/conversations: 201, or 200 if it exists."),
    "protocol.6.state": Promise("GET /v1/conversations/{id}: for members and services only."),
    "protocol.6.settings": Promise("PUT …/settings mutes and archives for one user, on all its devices."),
    "protocol.6.unread": Promise("GET /v1/unread: what is unread in all, muted conversations apart."),
    "protocol.6.page": Promise("GET …/events answers a page."),
    "protocol.6.receipts": Promise("GET …/receipts and the frame receipts tell who has a seq: counts, names by page."),
    "protocol.6.history": Promise("GET …/events/{seq}/history tells what an event said before it was edited."),
    "protocol.6.health": Promise("Every service serves /healthz, /readyz and /metrics on its private port."),
    "protocol.6.bad_body": Promise("A malformed HTTP body gets 400 bad_request, never the framework's 422."),
    "protocol.6.moderation": Promise("The moderation hook is asked before anything is written."),
    "protocol.6.metrics": Promise("The metrics that others rely on are exposed, at 0 from the start."),
    # 7. Kafka.
    "protocol.7.events": Promise("The events topic: key, value, headers, partition."),
    "protocol.7.receipts": Promise("The receipts topic: value with kind and cause, headers user_id and kind."),
    "protocol.7.acks": Promise("The acks topic: what gateways write and receipts reads."),
    "protocol.7.dead": Promise("A record that cannot be read goes to the dead topic and is skipped."),
    "protocol.7.late": Promise("A retried dead letter comes late, with its header."),
    # 8. Commands.
    "protocol.8.up": Promise("waybill up: all on this machine; endpoints.json; what dies is started again."),
    "protocol.8.migrate": Promise("waybill migrate is safe from several processes at once."),
    "protocol.8.bench": Promise("waybill bench ends with one JSON line."),
    "protocol.8.trace": Promise("waybill trace MESSAGE.", _TRACE),
    "protocol.8.dead": Promise("waybill dead list|show|retry|discard."),
    "protocol.8.check": Promise("waybill check audits a live deployment.", _PROOF),
    "protocol.8.drill": Promise("waybill drill NAME.", _PROOF),
    # 9. Small print.
    "protocol.9.order_of_checks": Promise("Shape, authentication, known id, membership, rights, target, moderation."),
    "protocol.9.targets": Promise("Targets: not_found, conflict and bad_request as listed."),
    "protocol.9.former_members": Promise("Former members may still pull what was visible."),
    "protocol.9.visible": Promise(
        "Visible ends are inclusive; the add is visible to the added, the removal to the removed."
    ),
    "protocol.9.ranges": Promise("Ranges: 1 ≤ from ≤ to ≤ 2⁶³−1, any order, may overlap; an empty list is malformed."),
    "protocol.9.present_state": Promise("Catch-up and pages show an event as it is now."),
    "protocol.9.expired": Promise("A body erased by age is null, and the frame says expired."),
    "protocol.9.windows": Promise("Edits, recalls and deletes within their windows; groups up to their size."),
    "protocol.9.creation_event": Promise("The creation event, its client_msg_id, and the reserved prefix."),
    "protocol.9.unread": Promise("unread counts visible messages and notices of others, not recalled or deleted."),
    "protocol.9.http": Promise("The HTTP page and state; senders of users and services."),
    "protocol.9.tokens": Promise("A bad token never refuses the upgrade: it opens, then closes 4401."),
    "protocol.9.defaults": Promise("The defaults of limits."),
    "protocol.9.rid": Promise("A bad rid is bad_request, field rid, answered without one."),
    "protocol.9.cursors": Promise("Cursors: 0 is allowed, negative closes 4400, an unknown conversation is ignored."),
    "protocol.9.order_in": Promise("Sends of one session to one conversation commit in arrival order."),
    "protocol.9.moderation": Promise("Moderation: message and edit only, outside any transaction."),
    "protocol.9.kafka": Promise("The kinds and types of records; header values are UTF-8 text."),
    "protocol.9.gateway_start": Promise("Positions are fixed before readyz and before any hello reads heads."),
    "protocol.9.metric_labels": Promise("The labels of the metrics."),
    "protocol.9.demo": Promise("The demo's figures mean what is written, and each can be other than 0."),
}
