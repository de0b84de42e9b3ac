"""How many sends leave, and how fast, on a server that limits them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from waybill_client import outputs
from waybill_client.outbox import send_fields
from waybill_client.pacing import MAX_IN_FLIGHT
from waybill_client.session import Session, Settings

from .frames_of_server import CHAT, sent, welcome


def wrote(done: list[outputs.Output]) -> list[dict[str, Any]]:
    return [json.loads(output.data) for output in done if isinstance(output, outputs.Write)]


def queue(one: Session, *names: str, now: float = 0.0, strict: bool = False) -> list[dict[str, Any]]:
    done: list[outputs.Output] = []
    for name in names:
        fields = send_fields(CHAT, name, "message", b"{}", None)
        done += one.request(("send", CHAT, name), fields, now, strict=strict)
    return wrote(done)


def session(rate: float | None = None, *, chance: float = 0.0) -> Session:
    one = Session("d", Settings(answer_timeout_s=1e9), random=lambda: chance)
    one.hello("t")
    one.receive(welcome(sends_per_s=rate), 0.0)
    return one


def refusal(frame: dict[str, Any], after_ms: int = 1000) -> dict[str, Any]:
    return {"t": "error", "rid": frame["rid"], "code": "rate_limited", "message": "", "retry_after_ms": after_ms}


def names(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["client_msg_id"] for frame in frames]


def test_a_bounded_number_is_under_way_and_each_answer_lets_the_next_one_go() -> None:
    one = session()
    wanted = [f"m{number}" for number in range(MAX_IN_FLIGHT + 2)]
    first = queue(one, *wanted)
    assert names(first) == wanted[:MAX_IN_FLIGHT]
    (next_one,) = wrote(one.receive(sent(first[5], 1), 0.0))
    assert next_one["client_msg_id"] == wanted[MAX_IN_FLIGHT]
    refused = {"t": "error", "rid": first[6]["rid"], "code": "forbidden", "message": ""}
    assert names(wrote(one.receive(refused, 0.0))) == wanted[MAX_IN_FLIGHT + 1 :]
    one.hello("t")
    again = names(wrote(one.receive(welcome(), 0.0)))
    assert again == [name for name in wanted if name not in ("m5", "m6")][:MAX_IN_FLIGHT]


def test_after_a_refusal_all_wait_and_then_leave_in_order_at_the_rate() -> None:
    one = session(rate=10.0)
    first, second = queue(one, "a", "b")
    assert wrote(one.receive(refusal(second), 0.0)) == []
    assert wrote(one.receive(refusal(first), 0.0)) == []
    assert queue(one, "c", "d", now=0.5) == []
    left: list[tuple[float, str]] = []
    while (at := one.next_at()) is not None and at < 1e8:
        left += [(round(at, 3), name) for name in names(wrote(one.tick(at)))]
    assert left == [(1.0, "a"), (1.1, "b"), (1.2, "c"), (1.3, "d")]
    assert names(queue(one, "e", "f", now=1.5)) == ["e", "f"], "once nothing waited, all leave at once again"


def test_a_new_connection_begins_without_the_wait_of_the_last() -> None:
    one = session(rate=0.01)
    (frame,) = queue(one, "a")
    one.receive(refusal(frame, 600_000), 0.0)
    one.hello("t")
    assert names(wrote(one.receive(welcome(), 1.0))) == ["a"]


def test_requests_of_other_kinds_do_not_wait_for_sends() -> None:
    one = session(rate=1.0)
    (frame,) = queue(one, "a")
    one.receive(refusal(frame), 0.0)
    create = b'"kind":"group","members":[]}'
    assert [frame["t"] for frame in wrote(one.request(("create", "", "x"), create, 0.0))] == ["create"]


def test_chance_keeps_those_apart_that_were_refused_together() -> None:
    waits = set()
    for chance in (0.1, 0.9):
        one = session(rate=10.0, chance=chance)
        (frame,) = queue(one, "a")
        one.receive(refusal(frame), 0.0)
        waits.add(one.next_at())
    assert len(waits) == 2
    assert min(at for at in waits if at is not None) >= 1.0


def test_two_devices_that_share_a_rate_are_refused_seldom() -> None:
    """The server counts a user's sends together: 50 a second and a burst of 500, as it does by default."""
    devices = [session(rate=50.0, chance=0.5), session(rate=50.0, chance=0.5)]
    frames: list[tuple[int, dict[str, Any]]] = []
    for number, one in enumerate(devices):
        frames += [(number, frame) for frame in queue(one, *(f"m{place}" for place in range(1500)))]
    now, tokens, filled = 0.0, 500.0, 0.0
    refused_at: list[float] = []
    committed = 0
    while committed < 3000 and now < 600:
        arrived, frames = frames, []
        for number, frame in arrived:
            tokens, filled = min(500.0, tokens + (now - filled) * 50), now
            if tokens >= 1:
                tokens, committed = tokens - 1, committed + 1
                answer = sent(frame, committed)
            else:
                refused_at.append(now)
                answer = refusal(frame, int(1000 * (1 - tokens) / 50) + 1)
            frames += [(number, one) for one in wrote(devices[number].receive(answer, now))]
        if frames:
            continue
        now += 0.01
        for number, one in enumerate(devices):
            frames += [(number, frame) for frame in wrote(one.tick(now))]
    assert committed == 3000
    assert now < 100, "2,500 sends at 50 a second, and not much more time than that"
    late = [at for at in refused_at if at > 1.0]
    assert len(late) < 10 * now, "a tenth of what it allows, far below what it takes for abuse"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_everything_is_committed_once_whatever_is_refused(
    arrivals: list[tuple[int, bool]], burst: int, rate: int
) -> None:
    """A server with a bucket; it counts what it had to refuse, too."""
    one = session(rate=float(rate))
    seqs: dict[str, int] = {}
    tokens, filled, now, number, refused = float(burst), 0.0, 0.0, 0, 0
    waiting: list[dict[str, Any]] = []

    def serve() -> None:
        nonlocal tokens, filled, refused
        while waiting:
            frame = waiting.pop(0)
            tokens, filled = min(float(burst), tokens + (now - filled) * rate), now
            if tokens < 1.0 - 1e-9:
                refused += 1
                answer = refusal(frame, int(1000 * (1.0 - tokens) / rate) + 1)
            else:
                tokens -= 1.0
                seqs.setdefault(frame["client_msg_id"], len(seqs) + 1)
                answer = sent(frame, seqs[frame["client_msg_id"]])
            waiting.extend(wrote(one.receive(answer, now)))

    for count, strict in arrivals:
        now += 0.1
        waiting += wrote(one.tick(now))
        for _ in range(count):
            number += 1
            waiting += queue(one, f"m{number}", now=now, strict=strict)
        serve()
    for _ in range(2000):
        at = one.next_at()
        if not len(one.outbox) or at is None:
            break
        now = max(now, at)
        waiting += wrote(one.tick(now))
        serve()
    assert len(seqs) == number
    assert len(one.outbox) == 0
    assert refused <= 40 * len(arrivals), "refusals must not repeat themselves"
