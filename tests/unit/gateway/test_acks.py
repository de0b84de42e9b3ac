"""What waits for Kafka's confirmation: nothing is lost by a failure, and nothing grows without end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import acks
from services.gateway.acks import Device, Mark, Waiting
from shared.errors import UnavailableError
from shared.ranges import RangeSet

PHONE, TABLET = Device("c", "ann", "phone"), Device("c", "ann", "tablet")


def test_ranges_of_a_device_are_folded() -> None:
    waiting = Waiting()
    for low, high in ((1, 3), (7, 9), (4, 6)):
        waiting.hold(PHONE, RangeSet([(low, high)]))
    assert waiting.records() == [
        ("c", {"conversation_id": "c", "user_id": "ann", "device_id": "phone", "kind": "delivered", "ranges": [(1, 9)]})
    ]
    assert len(waiting) == 1


def test_marks_keep_their_order() -> None:
    waiting = Waiting()
    for seq in (5, 3, 9):
        waiting.mark(Mark(PHONE, "read", seq, 0))
    waiting.mark(Mark(PHONE, "unread", 1, 1))
    assert [(value["kind"], value["seq"], value["version"]) for _, value in waiting.records()] == [
        ("read", 5, 0),
        ("read", 3, 0),
        ("read", 9, 0),
        ("unread", 1, 1),
    ]


def test_a_record_has_as_many_ranges_as_a_frame_may() -> None:
    waiting = Waiting()
    waiting.hold(PHONE, RangeSet((2 * n, 2 * n) for n in range(1, 2502)))
    sizes = [len(value["ranges"]) for _, value in waiting.records()]  # type: ignore[arg-type]
    assert sizes == [1000, 1000, 501]


@pytest.mark.promise("I10")
def test_what_was_not_confirmed_goes_again_before_what_came_since() -> None:
    waiting = Waiting()
    waiting.hold(PHONE, RangeSet([(1, 3)]))
    waiting.mark(Mark(PHONE, "read", 3, 0))
    taken = waiting.take(10)
    assert len(waiting) == 0
    waiting.hold(PHONE, RangeSet([(5, 5)]))
    waiting.hold(TABLET, RangeSet([(1, 1)]))
    waiting.mark(Mark(PHONE, "read", 5, 0))
    waiting.put_back(taken)
    assert waiting.held == {PHONE: RangeSet([(1, 3), (5, 5)]), TABLET: RangeSet([(1, 1)])}
    assert [mark.seq for mark in waiting.marks[PHONE]] == [3, 5]
    assert len(waiting) == 4


def test_a_device_and_all_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "_MOST_OF_DEVICE", 2)
    monkeypatch.setattr(acks, "_MOST_MARKS", 3)
    waiting = Waiting()
    for seq in (1, 2):
        waiting.mark(Mark(PHONE, "read", seq, 0))
    with pytest.raises(UnavailableError):
        waiting.mark(Mark(PHONE, "read", 3, 0))
    waiting.mark(Mark(TABLET, "read", 1, 0))
    with pytest.raises(UnavailableError):
        waiting.mark(Mark(TABLET, "read", 2, 0))
    waiting.take(10)
    waiting.mark(Mark(PHONE, "read", 3, 0))


DEVICES = st.builds(Device, st.sampled_from("abc"), st.just("ann"), st.sampled_from(["phone", "tablet"]))
STEPS = st.one_of(
    st.tuples(st.just("hold"), DEVICES, st.integers(1, 30)),
    st.tuples(st.just("mark"), DEVICES, st.integers(1, 30)),
    st.tuples(st.sampled_from(["flush", "fail"]), st.none(), st.integers(1, 4)),
)


@given(st.lists(STEPS, max_size=40))
def test_nothing_is_lost_however_often_kafka_fails(steps: list[tuple[str, Device | None, int]]) -> None:
    waiting = Waiting()
    given_seqs: set[tuple[Device, int]] = set()
    confirmed: set[tuple[Device, int]] = set()
    marks: dict[Device, list[int]] = {}
    marked: dict[Device, list[int]] = {}

    def confirm(taken: Waiting) -> None:
        confirmed.update((device, seq) for device, ranges in taken.held.items() for seq in ranges.seqs())
        for device, some in taken.marks.items():
            marked.setdefault(device, []).extend(mark.seq for mark in some)

    for kind, device, number in steps:
        if kind == "hold" and device is not None:
            waiting.hold(device, RangeSet([(number, number)]))
            given_seqs.add((device, number))
        elif kind == "mark" and device is not None:
            waiting.mark(Mark(device, "read", number, 0))
            marks.setdefault(device, []).append(number)
        else:
            taken = waiting.take(number)
            if kind == "flush":
                confirm(taken)
            else:
                waiting.put_back(taken)
    while len(waiting):
        confirm(waiting.take(2))
    assert confirmed == given_seqs
    assert marked == marks
