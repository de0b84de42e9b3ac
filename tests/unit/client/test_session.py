from __future__ import annotations

import json
from typing import Any

import pytest
from waybill_client import errors, outputs
from waybill_client.outbox import send_fields
from waybill_client.session import Session, Settings
from waybill_client.store import Outgoing, Saved

from .frames_of_server import CHAT, ME, conversation, event, page, receipt, sent, welcome


def session(**settings: Any) -> Session:
    return Session("d", Settings(**settings), random=lambda: 1.0)


def online(**settings: Any) -> Session:
    one = session(**settings)
    one.hello("token")
    one.receive(welcome(), 0.0)
    return one


def wrote(done: list[outputs.Output]) -> list[dict[str, Any]]:
    return [json.loads(output.data) for output in done if isinstance(output, outputs.Write)]


def delivered(done: list[outputs.Output]) -> list[int]:
    return [output.event.seq for output in done if isinstance(output, outputs.Deliver)]


def send(one: Session, client_msg_id: str = "a", now: float = 0.0, *, strict: bool = False) -> list[dict[str, Any]]:
    fields = send_fields(CHAT, client_msg_id, "message", b'{"n":1.10}', None)
    one.outbox.check(("send", CHAT, client_msg_id), fields)
    return wrote(one.request(("send", CHAT, client_msg_id), fields, now, strict=strict))


def take(one: Session, *seqs: int, now: float = 0.0) -> list[outputs.Output]:
    done: list[outputs.Output] = []
    for seq in seqs:
        done += one.receive(event(seq), now)
    return done


def test_an_empty_store_says_so_in_full_and_is_silent_in_live() -> None:
    assert session().hello("t")["cursors"] == {}
    assert "cursors" not in session(sync="live").hello("t")


def test_live_begins_at_the_head_and_pulls_nothing() -> None:
    one = online(sync="live")
    assert wrote(one.receive(conversation(70, 70), 0.0)) == []
    assert delivered(take(one, 71)) == [71]


def test_hello_names_the_event_held_at_the_cursor() -> None:
    one = online()
    one.receive(conversation(2, 0), 0.0)
    take(one, 1, 2)
    one.stored(CHAT, [1, 2], 0.0)
    assert one.hello("t")["cursors"] == {CHAT: [2, "e2"]}


def test_a_cursor_never_acks_what_is_not_released() -> None:
    one = online()
    one.receive(conversation(3, 0), 0.0)
    take(one, 1, 2, 3)
    one.stored(CHAT, [1], 0.0)
    assert one.hello("t")["cursors"] == {CHAT: [1, "e1"]}
    one.receive(welcome(), 0.0)
    one.receive(conversation(3, 1), 0.0)
    assert delivered(take(one, 2, 3, 4)) == [4]


def test_repeats_are_dropped_and_acked_again() -> None:
    one = online()
    one.receive(conversation(1, 0), 0.0)
    assert delivered(take(one, 1)) == [1]
    assert wrote(one.stored(CHAT, [1], 0.0)) == []
    assert wrote(one.tick(0.1)) == [{"t": "ack", "conversation_id": CHAT, "ranges": [[1, 1]]}]
    assert delivered(take(one, 1, now=1.0)) == []
    assert wrote(one.tick(1.1)) == [{"t": "ack", "conversation_id": CHAT, "ranges": [[1, 1]]}]
    assert one.stats.repeats == 1


def test_acks_leave_at_once_when_they_are_many_and_folded() -> None:
    one = online(ack_events=3)
    one.receive(conversation(9, 0), 0.0)
    take(one, 1, 2, 3)
    assert wrote(one.stored(CHAT, [1, 2, 3], 0.0)) == [{"t": "ack", "conversation_id": CHAT, "ranges": [[1, 3]]}]
    assert one.next_at() is None


def test_an_app_that_acks_itself_is_not_acked_for() -> None:
    one = online(auto_ack=False)
    one.receive(conversation(3, 0), 0.0)
    take(one, 1, 2, 3)
    assert one.stored(CHAT, [1, 2, 3], 0.0) == []
    assert wrote(take(one, 1, now=9.0)) == []
    one.tick(10.0)
    one.ack(CHAT, [(2, 99)], 20.0)
    assert wrote(one.tick(20.1)) == [{"t": "ack", "conversation_id": CHAT, "ranges": [[2, 3]]}]
    assert one.hello("t")["cursors"] == {CHAT: 0}


def test_a_frame_above_what_is_held_is_pulled() -> None:
    one = online()
    (pull,) = wrote(one.receive(conversation(5, 2), 0.0))
    assert pull == {"t": "pull", "rid": pull["rid"], "conversation_id": CHAT, "after": 0, "limit": 200}
    assert delivered(take(one, 3)) == []
    assert delivered(one.receive(page(pull["rid"], [event(1), event(2)], after=0, head=5), 0.0)) == [1, 2, 3]
    assert one.stats.gaps == 0


def test_a_pull_goes_on_to_where_the_server_began() -> None:
    one = online()
    (pull,) = wrote(one.receive(conversation(3, 3), 0.0))
    done = one.receive(page(pull["rid"], [event(1)], after=0, head=3, complete=False), 0.0)
    (more,) = wrote(done)
    assert more["after"] == 1
    done = one.receive(page(more["rid"], [event(2), event(3)], after=1, head=3, complete=False), 0.0)
    assert delivered(done) == [2, 3]
    assert wrote(done) == []


def test_a_jump_over_what_is_not_visible_is_no_gap() -> None:
    one = online()
    one.receive(conversation(9, 0, visible=[[1, 2], [7, None]]), 0.0)
    assert delivered(take(one, 1, 2, 7)) == [1, 2, 7]
    assert one.stats.gaps == 0


def test_a_gap_is_counted_pulled_and_closed_in_order() -> None:
    one = online()
    one.receive(conversation(5, 0), 0.0)
    done = take(one, 1, 4, 5)
    (pull,) = wrote(done)
    assert delivered(done) == [1]
    assert pull["after"] == 1
    done = one.receive(page(pull["rid"], [event(2), event(3)], after=1, head=5, complete=False), 0.0)
    assert delivered(done) == [2, 3, 4, 5]
    assert wrote(done) == []
    assert one.stats.gaps == 1


def test_a_gap_that_the_server_does_not_know_ends() -> None:
    one = online()
    one.receive(conversation(5, 0), 0.0)
    (pull,) = wrote(take(one, 3))
    assert delivered(one.receive(page(pull["rid"], [], after=0, head=5), 0.0)) == [3]


def test_a_failed_pull_is_repeated_later() -> None:
    one = online()
    one.receive(conversation(5, 0), 0.0)
    (pull,) = wrote(take(one, 3))
    one.receive({"t": "error", "rid": pull["rid"], "code": "unavailable", "message": ""}, 1.0)
    assert one.next_at() == 3.0
    (again,) = wrote(one.tick(3.0))
    assert again["after"] == 0
    assert again["rid"] != pull["rid"]


def test_a_pull_without_an_answer_is_repeated() -> None:
    one = online()
    one.receive(conversation(5, 0), 0.0)
    take(one, 3)
    (again,) = wrote(one.tick(15.0))
    assert again["t"] == "pull"


def test_a_cursor_above_the_head_is_taken_back() -> None:
    one = session()
    one.restore([Saved(CHAT, last_pulled_seq=9, last_rendered_seq=9, acked_seq=9, event_id="e9")], [], 0.0)
    assert one.hello("t")["cursors"] == {CHAT: [9, "e9"]}
    one.receive(welcome(), 0.0)
    done = one.receive(conversation(4, 4), 0.0)
    assert outputs.Rewound(CHAT, 4) in done
    assert delivered(take(one, 5)) == [5]


def test_a_later_frame_with_an_old_head_takes_nothing_back() -> None:
    one = online()
    one.receive(conversation(1, 0), 0.0)
    take(one, 1, 2, 3)
    one.receive(conversation(1, 0, title="new"), 0.0)
    assert one.timelines[CHAT].cursor == 3
    assert one.timelines[CHAT].view().title == "new"
    one.stored(CHAT, [1, 2, 3], 0.0)
    one.hello("t")
    one.receive(welcome(), 0.0)
    one.receive(conversation(3, 3), 0.0)
    one.receive(conversation(2, 2), 0.0)
    assert one.timelines[CHAT].cursor == 3


def test_another_event_at_a_held_seq_asks_to_be_healed_once() -> None:
    one = online()
    one.receive(conversation(2, 0), 0.0)
    take(one, 1, 2)
    assert one.receive(event(2, event_id="other"), 0.0) == [outputs.Disagrees(CHAT)]
    assert one.receive(event(1, event_id="other"), 0.0) == []
    one.rewind(CHAT, 0)
    assert one.timelines[CHAT].cursor == 0
    assert delivered(one.receive(event(1, event_id="other"), 0.0)) == [1]


def test_reset_asks_to_be_healed() -> None:
    one = online()
    assert outputs.Disagrees(CHAT) in one.receive(conversation(5, 0, reset=True), 0.0)


def test_a_send_keeps_its_id_over_reconnects_and_its_digits() -> None:
    one = session()
    assert send(one) == []
    one.hello("t")
    (first,) = wrote(one.receive(welcome(), 0.0))
    assert b'"body":{"n":1.10}' in one.outbox._pending["send", CHAT, "a"].fields
    one.hello("t")
    (second,) = wrote(one.receive(welcome(), 0.0))
    assert first["client_msg_id"] == second["client_msg_id"] == "a"
    assert first["rid"] != second["rid"]
    answers = one.receive(sent(second, 1), 0.0)
    assert [type(one) for one in answers] == [outputs.Answered]
    assert one.receive(sent(second, 1), 0.0) == []
    assert one.stats.late_answers == 1


def test_sends_leave_again_in_their_order() -> None:
    one = online()
    for name in "abc":
        send(one, name)
    one.hello("t")
    assert [frame["client_msg_id"] for frame in wrote(one.receive(welcome(), 0.0))] == ["a", "b", "c"]


@pytest.mark.parametrize("code", ["timeout", "unavailable", "internal"])
def test_an_indefinite_error_is_asked_again(code: str) -> None:
    one = online()
    (frame,) = send(one)
    assert one.receive({"t": "error", "rid": frame["rid"], "code": code, "message": ""}, 0.0) == []
    at = one.next_at()
    assert at is not None
    (again,) = wrote(one.tick(at))
    assert again["client_msg_id"] == "a"
    assert one.stats.resends == 1


def test_rate_limited_waits_as_long_as_it_is_told() -> None:
    one = online()
    (frame,) = send(one)
    refusal = {"t": "error", "rid": frame["rid"], "code": "rate_limited", "message": "", "retry_after_ms": 3000}
    assert one.receive(refusal, 0.0) == []
    assert wrote(one.tick(2.9)) == []
    assert len(wrote(one.tick(4.0))) == 1


def test_internal_is_not_asked_for_ever() -> None:
    one = online()
    (frame,) = send(one)
    now = 0.0
    for _ in range(4):
        assert one.receive({"t": "error", "rid": frame["rid"], "code": "internal", "message": ""}, now) == []
        now += 20.0
        (frame,) = wrote(one.tick(now))
    (failed,) = one.receive({"t": "error", "rid": frame["rid"], "code": "internal", "message": ""}, now)
    assert isinstance(failed, outputs.Failed)
    assert not failed.error.definite


def test_a_definite_error_ends_it_with_its_fields() -> None:
    one = online()
    (frame,) = send(one)
    refusal = {"t": "error", "rid": frame["rid"], "code": "bad_request", "message": "no", "field": "body"}
    (failed,) = one.receive(refusal, 0.0)
    assert isinstance(failed, outputs.Failed)
    assert isinstance(failed.error, errors.BadRequest)
    assert failed.error.definite
    assert failed.error.field == "body"
    assert len(one.outbox) == 0


def test_an_error_of_an_abandoned_attempt_ends_nothing() -> None:
    one = online()
    (first,) = send(one)
    one.hello("t")
    one.receive(welcome(), 0.0)
    assert one.receive({"t": "error", "rid": first["rid"], "code": "forbidden", "message": ""}, 0.0) == []
    assert len(one.outbox) == 1


def test_no_answer_is_asked_again() -> None:
    one = online()
    send(one)
    assert wrote(one.tick(14.9)) == []
    assert len(wrote(one.tick(15.0))) == 1


def test_strict_sends_leave_one_by_one() -> None:
    one = online()
    (first,) = send(one, "a")
    assert send(one, "b", strict=True) == []
    assert send(one, "c", strict=True) == []
    (second,) = wrote(one.receive(sent(first, 1), 0.0))
    assert second["client_msg_id"] == "b"
    one.hello("t")
    (second,) = wrote(one.receive(welcome(), 0.0))
    refusal = {"t": "error", "rid": second["rid"], "code": "forbidden", "message": ""}
    (third,) = wrote(one.receive(refusal, 0.0))
    assert third["client_msg_id"] == "c"


def test_what_is_too_large_never_leaves() -> None:
    one = session()
    fields = send_fields(CHAT, "a", "message", b'{"x":"%b"}' % (b"x" * 2000), None)
    one.request(("send", CHAT, "a"), fields, 0.0)
    one.hello("t")
    done = one.receive(welcome(frame_bytes=1024), 0.0)
    assert wrote(done) == []
    assert any(isinstance(output, outputs.Failed) and output.error.code == "too_large" for output in done)
    with pytest.raises(errors.TooLarge):
        one.outbox.check(("send", CHAT, "b"), fields)


def test_another_content_under_a_waiting_id_is_refused_here() -> None:
    one = online()
    send(one)
    with pytest.raises(errors.ClientMsgIdReused):
        one.outbox.check(("send", CHAT, "a"), b"other")


def test_the_own_read_mark_is_told_again() -> None:
    one = online()
    one.receive(conversation(9, 9, visible=[[10, None]]), 0.0)
    assert wrote(one.read(CHAT, 5)) == [{"t": "read", "conversation_id": CHAT, "seq": 5, "version": 0}]
    assert one.read(CHAT, 4) == []
    again = wrote(one.receive(conversation(9, 9, visible=[[10, None]], read_seq=3), 0.0))
    assert again == [{"t": "read", "conversation_id": CHAT, "seq": 5, "version": 0}]
    assert wrote(one.unread(CHAT, 2)) == [{"t": "unread", "conversation_id": CHAT, "seq": 2, "version": 1}]
    again = wrote(one.receive(conversation(9, 9, visible=[[10, None]], read_seq=5), 0.0))
    assert again == [{"t": "unread", "conversation_id": CHAT, "seq": 2, "version": 1}]
    assert wrote(one.receive(conversation(9, 9, visible=[[10, None]], read_seq=2, read_version=1), 0.0)) == []


def test_receipts_only_grow() -> None:
    one = online()
    told = [receipt("bob", 5, 0, 3), receipt("bob", 4, 0, 2), receipt("bob", 4, 1, 1), receipt("bob", 6, 0, 9)]
    grown = [
        output.receipt
        for frame in told
        for output in one.receive(frame, 0.0)
        if isinstance(output, outputs.ReceiptGrew)
    ]
    assert [(one.delivered_seq, one.read_version, one.read_seq) for one in grown] == [(5, 0, 3), (5, 1, 1), (6, 1, 1)]


def test_a_receipt_of_this_user_moves_the_own_mark() -> None:
    one = online()
    one.receive(receipt(ME, 4, 1, 2), 0.0)
    assert (one.timelines[CHAT].delivered_seq, one.timelines[CHAT].mark) == (4, (1, 2))


@pytest.mark.parametrize(
    "frame",
    [
        {},
        {"t": 1},
        {"t": []},
        {"t": "event"},
        event(1) | {"seq": "1"},
        event(1) | {"conversation_id": []},
        {"t": "conversation", "conversation_id": CHAT},
        conversation(1, 0) | {"visible": 5},
        {"t": "sent", "rid": {}},
        {"t": "page", "rid": []},
        {"t": "error", "rid": {}},
        {"t": "created", "conversation_id": CHAT, "rid": []},
        {"t": "reconnect", "after_ms": "soon"},
        {"t": "from_the_future"},
    ],
)
def test_a_frame_that_cannot_be_read_changes_nothing(frame: dict[str, Any]) -> None:
    one = online()
    assert one.receive(frame, 0.0) == []
    assert one.timelines == {}
    stats = one.stats
    assert stats.bad_frames + stats.unknown_frames + stats.late_answers == 1


def test_another_event_where_an_own_message_was_sent_asks_to_be_healed() -> None:
    one = online()
    one.receive(conversation(0, 0), 0.0)
    (frame,) = send(one)
    one.receive(sent(frame, 1), 0.0)
    assert one.receive(event(1, event_id="other"), 0.0) == [outputs.Disagrees(CHAT)]


def test_a_sent_where_another_event_is_held_asks_to_be_healed() -> None:
    one = online()
    one.receive(conversation(0, 0), 0.0)
    first, second = send(one, "a")[0], send(one, "b")[0]
    take(one, 1)
    assert outputs.Disagrees(CHAT) in one.receive(sent(first, 1, event_id="other"), 0.0)
    one.heal_failed(CHAT)
    one.receive(sent(second, 2), 0.0)
    (third,) = send(one, "c")
    assert outputs.Disagrees(CHAT) in one.receive(sent(third, 2, event_id="other"), 0.0)


def test_a_sent_above_the_head_of_the_next_session_is_lost() -> None:
    one = online()
    one.receive(conversation(3, 0), 0.0)
    take(one, 1, 2, 3)
    (frame,) = send(one)
    one.receive(sent(frame, 5), 0.0)
    one.hello("t")
    one.receive(welcome(), 0.0)
    assert outputs.Rewound(CHAT, 4) in one.receive(conversation(4, 3), 0.0)
    assert one.timelines[CHAT].cursor == 3
    again = one.receive(conversation(4, 3), 0.0)
    assert not any(isinstance(output, outputs.Rewound) for output in again)


def test_what_an_earlier_process_was_told_is_sent_is_held_against_the_server() -> None:
    message = Outgoing(CHAT, "a", "message", b"{}", state="sent", event_id="e5", seq=5)
    one = session()
    one.restore([Saved(CHAT, last_pulled_seq=4)], [message], 0.0)
    one.hello("t")
    assert wrote(one.receive(welcome(), 0.0)) == []
    one.receive(conversation(5, 4), 0.0)
    assert one.receive(event(5, event_id="other"), 0.0) == [outputs.Disagrees(CHAT)]


def test_a_page_that_was_under_way_while_the_timeline_was_rewound_leaves_no_hole() -> None:
    one = online()
    one.receive(conversation(9, 0), 0.0)
    take(one, 1, 2, 3)
    (pull,) = wrote(take(one, 7))
    one.rewind(CHAT, 1)
    assert one.receive(page(pull["rid"], [event(4), event(5)], after=3, head=9), 0.0) == []
    assert one.stats.late_answers == 1
    assert delivered(take(one, 2)) == [2]
    assert wrote(take(one, 7))[0]["after"] == 2


def test_a_rewind_forgets_what_was_told_of_what_is_lost() -> None:
    one = online()
    one.receive(conversation(9, 0, delivered_seq=9, read_seq=9), 0.0)
    take(one, *range(1, 10))
    one.receive(receipt("bob", 9, 0, 9), 0.0)
    one.rewind(CHAT, 4)
    view = one.timelines[CHAT].view()
    assert (view.head, view.cursor, view.delivered_seq, view.read_seq) == (4, 4, 4, 4)
    (grown,) = one.receive(receipt("bob", 3, 0, 3), 0.0)
    assert isinstance(grown, outputs.ReceiptGrew)
    assert grown.receipt.delivered_seq == 3


def test_a_rewind_stops_what_was_aimed_at_a_lost_event() -> None:
    one = session()
    aims = {"m": None, "on 3": 3, "on 4": 4, "on 5": 5}
    for name, target in aims.items():
        type_ = "message" if target is None else "delete"
        one.request(("send", CHAT, name), send_fields(CHAT, name, type_, None, target), 0.0)
    one.restore([Saved(CHAT, last_pulled_seq=9)], [], 0.0)
    done = one.rewind(CHAT, 3)
    failed = [output for output in done if isinstance(output, outputs.Failed)]
    assert [(output.key[2], output.error.code) for output in failed] == [("on 4", "conflict"), ("on 5", "conflict")]
    assert [key[2] for key in one.outbox] == ["m", "on 3"]
