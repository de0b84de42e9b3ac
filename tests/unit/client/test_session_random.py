"""Whatever is lost, repeated or cut off: the app sees each visible seq once and in order, each send is written once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from waybill_client import outputs
from waybill_client.outbox import send_fields
from waybill_client.session import Session, Settings

from .frames_of_server import CHAT, ME, conversation, event, page, sent, welcome


@dataclass
class Server:
    """The least server that keeps the protocol: dense seqs, idempotent sends, push from the cursor."""

    hidden: set[int]
    seqs: dict[str, int] = field(default_factory=dict)
    head: int = 0
    pushed: int = 0
    acked: set[int] = field(default_factory=set)
    out: list[dict[str, Any]] = field(default_factory=list)

    def visible(self, low: int, high: int) -> list[int]:
        return [seq for seq in range(low, high + 1) if seq not in self.hidden]

    def ranges(self) -> list[list[int | None]]:
        seqs = self.visible(1, 300)
        starts = [seq for seq in seqs if seq - 1 not in seqs]
        ends = [seq for seq in seqs if seq + 1 not in seqs]
        spans: list[list[int | None]] = [[a, b] for a, b in zip(starts, ends, strict=True)]
        spans[-1][1] = None
        return spans

    def write(self) -> None:
        self.head += 1

    def push(self) -> None:
        for seq in self.visible(self.pushed + 1, self.head):
            self.out.append(event(seq))
        self.pushed = self.head

    def repeat(self) -> None:
        self.out += [event(seq) for seq in self.visible(1, self.pushed) if seq not in self.acked]

    def take(self, frame: dict[str, Any]) -> None:
        if frame["t"] == "hello":
            cursor = frame["cursors"].get(CHAT, 0)
            self.pushed = cursor if isinstance(cursor, int) else cursor[0]
            self.acked |= set(range(1, self.pushed + 1))
            self.out = [welcome(), conversation(self.head, self.pushed, visible=self.ranges())]
        elif frame["t"] == "send":
            known = frame["client_msg_id"] in self.seqs
            if not known:
                self.head += 1
                while self.head in self.hidden:
                    self.head += 1
                self.seqs[frame["client_msg_id"]] = self.head
            self.out.append(sent(frame, self.seqs[frame["client_msg_id"]], duplicate=known))
        elif frame["t"] == "pull":
            seqs = self.visible(frame["after"] + 1, self.head)[: frame["limit"]]
            complete = not self.visible((seqs[-1] if seqs else frame["after"]) + 1, self.head)
            answer = page(frame["rid"], [event(seq) for seq in seqs], after=frame["after"], head=self.head)
            self.out.append(answer | {"complete": complete})
        elif frame["t"] == "ack":
            for low, high in frame["ranges"]:
                self.acked |= set(range(low, high + 1))


step = st.sampled_from(
    ["write", "write", "push", "push", "repeat", "cut", "lose", "read", "read", "read", "send", "tick"]
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(step, max_size=80),
    hidden=st.sets(st.integers(1, 40), max_size=12),
    lost=st.randoms(use_true_random=False),
)
def test_each_seq_once_and_in_order(steps: list[str], hidden: set[int], lost: Any) -> None:
    server = Server(hidden)
    session = Session("d", Settings(pull_limit=3, ack_events=5), random=lambda: 0.5)
    shown: list[int] = []
    answered: dict[str, int] = {}
    now = 0.0
    number = 0

    def act(done: list[outputs.Output]) -> None:
        for output in done:
            if isinstance(output, outputs.Write):
                server.take(json.loads(output.data))
            elif isinstance(output, outputs.Deliver):
                shown.append(output.event.seq)
                act(session.stored(CHAT, [output.event.seq], now))
            elif isinstance(output, outputs.Answered):
                key = output.key[2]
                assert key not in answered
                answered[key] = getattr(output.value, "seq", 0)

    def read(count: int) -> None:
        for _ in range(min(count, len(server.out))):
            act(session.receive(server.out.pop(0), now))

    def reconnect() -> None:
        session.disconnected()
        server.take(session.hello("t"))

    reconnect()
    for what in steps:
        now += 0.05
        if what == "write":
            server.write()
        elif what == "push":
            server.push()
        elif what == "repeat":
            server.repeat()
        elif what == "cut":
            reconnect()
        elif what == "lose" and server.out:
            # Not TCP's doing but a server's fault: one frame never comes. Only events, so that the rest stays lawful.
            at = lost.randrange(len(server.out))
            if server.out[at]["t"] == "event":
                del server.out[at]
        elif what == "read":
            read(4)
        elif what == "send":
            number += 1
            fields = send_fields(CHAT, f"s{number}", "message", b"{}", None)
            act(session.request(("send", CHAT, f"s{number}"), fields, now))
        elif what == "tick":
            act(session.tick(now))
        assert shown == sorted(set(shown)), "doubled or out of order"

    reconnect()
    for _ in range(200):
        now += 20.0
        server.push()
        read(1000)
        act(session.tick(now))
        if not server.out and not len(session.outbox):
            break
    assert shown == server.visible(1, server.head)
    assert answered == server.seqs
    assert len(answered) == number
    act(session.flush_acks())
    assert server.acked >= set(server.visible(1, server.head))
    assert session.user_id == ME
