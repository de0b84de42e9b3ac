from __future__ import annotations

from dataclasses import replace

import pytest

from services.console.demo.recording import Shown, Tick
from services.console.demo.verdict import FIGURES, Truth, Verdict, judge, missing
from shared.ranges import OPEN, RangeSet
from tests.unit.console.demo.stories import CHAT, EVENTS, OTHER, event_id, recording, truth

pytestmark = pytest.mark.promise("protocol.9.demo")


def only(verdict: Verdict) -> dict[str, int]:
    return {name: count for name, count in verdict.figures().items() if count}


def test_a_run_that_kept_every_promise_has_only_zeros() -> None:
    verdict = judge(truth(), [recording("ada", "ada-phone"), recording("ben", "ben-phone")])
    assert verdict.good
    assert verdict.figures() == dict.fromkeys(FIGURES, 0)
    assert verdict.notes == []


@pytest.mark.parametrize("at", [0, 5, -1])
def test_lost_is_what_was_never_displayed_wherever_it_stood(at: int) -> None:
    spoilt = recording("ada", "ada-phone")
    gone = spoilt.shown.pop(at)
    verdict = judge(truth(), [spoilt])
    assert only(verdict) == {"lost": 1}
    assert verdict.notes == [f"lost: {gone.seq} of {gone.conversation_id} was never displayed on ada-phone"]
    assert missing(truth(), spoilt) == 1


def test_lost_is_counted_on_each_device_that_lacks_it() -> None:
    devices = [recording("ada", "ada-phone"), recording("ben", "ben-phone")]
    for device in devices:
        del device.shown[3]
    assert only(judge(truth(), devices)) == {"lost": 2}


def test_an_acknowledged_send_that_is_not_committed_is_lost() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.acked["client-x"] = (CHAT, "event-nowhere")
    assert only(judge(truth(), [spoilt])) == {"lost": 1}


def test_another_event_displayed_at_that_seq_does_not_stand_for_the_committed_one() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.shown[4] = replace(spoilt.shown[4], event_id="event-of-another-life")
    verdict = judge(truth(), [spoilt])
    assert only(verdict) == {"lost": 1}
    assert verdict.strangers == 1


def test_duplicated_counts_each_further_display() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.shown += [spoilt.shown[-1], spoilt.shown[-1]]
    assert only(judge(truth(), [spoilt])) == {"duplicated": 2}


def test_a_late_repeat_is_duplicated_not_disordered() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.shown.append(spoilt.shown[0])
    assert only(judge(truth(), [spoilt])) == {"duplicated": 1}


@pytest.mark.parametrize(("after_s", "count"), [([0.1], 1), ([4.0], 1), ([5.1], 0), ([5.1, 15.1], 0), ([5.1, 9.0], 1)])
def test_what_a_session_is_sent_again_before_its_ack_could_be_missed_is_duplicated(
    after_s: list[float], count: int
) -> None:
    device = recording("ada", "ada-phone")
    last = device.pushed[-1]
    sender = recording("ben", "ben-phone")
    sender.written[last.client_msg_id] = last.at - 0.01
    device.pushed += [replace(last, at=last.at + after) for after in after_s]
    assert judge(truth(), [device, sender]).duplicated == count


def test_a_repeat_in_another_session_is_how_a_reconnect_works() -> None:
    device = recording("ada", "ada-phone")
    device.opened[3], device.resend_s[3] = device.pushed[-1].at, 5.0
    device.pushed += [replace(one, session=3, at=one.at + 100) for one in device.pushed if one.session == 2]
    assert judge(truth(), [device]).good


def test_disordered_is_below_a_higher_one_of_the_same_conversation() -> None:
    spoilt = recording("ada", "ada-phone", (CHAT,))
    held = replace_visible(truth(), CHAT)
    spoilt.shown[1], spoilt.shown[3] = spoilt.shown[3], spoilt.shown[1]
    assert only(judge(held, [spoilt])) == {"disordered": 2}


def test_conversations_have_no_order_among_each_other() -> None:
    device = recording("ada", "ada-phone")
    device.shown.sort(key=lambda one: (one.conversation_id, one.seq))
    assert judge(truth(), [device]).good


def test_gaps_are_what_a_session_jumped_over_even_if_the_device_closed_them() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.pushed = [one for one in spoilt.pushed if (one.session, one.conversation_id, one.seq) != (1, OTHER, 3)]
    assert only(judge(truth(), [spoilt])) == {"gaps": 1}


def test_a_session_that_begins_above_its_own_cursor_has_a_gap() -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.starts[2, CHAT] = 1
    assert only(judge(truth(), [spoilt])) == {"gaps": 1}


def test_what_is_not_visible_is_neither_lost_nor_a_gap() -> None:
    device = recording("ada", "ada-phone", (CHAT,))
    device.shown = [one for one in device.shown if one.seq not in (2, 3)]
    device.pushed = [one for one in device.pushed if one.seq not in (2, 3)]
    held = Truth(truth().events, {(CHAT, "ada"): RangeSet([(1, 1), (4, OPEN)])})
    assert judge(held, [device]).good


def test_what_is_displayed_without_being_visible_is_a_stranger() -> None:
    device = recording("ada", "ada-phone", (CHAT,))
    held = Truth(truth().events, {(CHAT, "ada"): RangeSet([(1, 4), (6, OPEN)])})
    verdict = judge(held, [device])
    assert verdict.strangers == 1
    assert not verdict.good


@pytest.mark.parametrize(
    "tick", [Tick(CHAT, "ben", EVENTS - 1, (0, 3)), Tick(CHAT, "ben", EVENTS, (0, 2)), Tick(CHAT, "ben", 0, (0, 9))]
)
def test_a_regression_is_a_mark_below_one_shown_before(tick: Tick) -> None:
    spoilt = recording("ada", "ada-phone")
    spoilt.ticks.append(tick)
    assert only(judge(truth(), [spoilt])) == {"regressions": 1}


def test_unread_lowers_a_mark_by_a_newer_version_and_that_is_no_regression() -> None:
    device = recording("ada", "ada-phone")
    device.ticks.append(Tick(CHAT, "ben", EVENTS, (1, 0)))
    assert judge(truth(), [device]).good


def test_an_empty_device_has_lost_everything() -> None:
    device = recording("ada", "ada-phone")
    device.shown.clear()
    device.pushed.clear()
    assert only(judge(truth(), [device])) == {"lost": 2 * EVENTS}
    assert missing(truth(), device) == 2 * EVENTS


def test_notes_are_bounded_counts_are_not() -> None:
    device = recording("ada", "ada-phone")
    device.shown += [Shown(CHAT, 1, event_id(CHAT, 1), 99.0)] * 500
    verdict = judge(truth(), [device])
    assert verdict.duplicated == 500
    assert len(verdict.notes) == 20


def replace_visible(held: Truth, chat: str) -> Truth:
    return Truth(held.events, {place: ranges for place, ranges in held.visible.items() if place[0] == chat})
