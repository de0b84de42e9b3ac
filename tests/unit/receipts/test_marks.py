import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from services.receipts.fold import Held, Mark
from services.receipts.marks import Marks, View, countable, deliver, ignored, propose
from shared.ranges import OPEN, RangeSet
from tests.unit.receipts.histories import Change, History, Scene, acks, batched, changes, histories, honest, shuffled

ALL = View(RangeSet([(1, OPEN)]), 10)


def ends_with(history: list[Held | Mark]) -> dict[str, Marks]:
    scene = Scene()
    for ack in history:
        scene.apply(batched([ack]))
    return scene.marks


@pytest.mark.promise("I8")
@settings(max_examples=60, deadline=None)
@given(st.lists(acks, min_size=1, max_size=5))
def test_every_order_of_a_history_ends_the_same(history: list[Held | Mark]) -> None:
    expected = ends_with(history)
    for order in itertools.permutations(history):
        assert ends_with(list(order)) == expected


@pytest.mark.promise("I8")
@given(st.lists(acks, max_size=25), st.data())
def test_late_doubled_and_reordered_acks_end_the_same(history: list[Held | Mark], data: st.DataObject) -> None:
    doubled = history + data.draw(st.lists(st.sampled_from(history), max_size=15)) if history else []
    assert ends_with(data.draw(st.permutations(doubled))) == ends_with(history)


@pytest.mark.promise("I8")
@given(st.lists(acks, max_size=25), st.data())
def test_any_cut_into_batches_ends_the_same(history: list[Held | Mark], data: st.DataObject) -> None:
    scene, at = Scene(), 0
    while at < len(history):
        size = data.draw(st.integers(1, len(history)))
        scene.apply(batched(history[at : at + size]))
        at += size
    assert scene.marks == ends_with(history)


@pytest.mark.promise("I8")
@given(st.lists(acks | changes, max_size=30))
def test_no_mark_goes_back_whatever_happens_to_membership_and_head(history: list[Held | Mark | Change]) -> None:
    scene = Scene()
    for step in history:
        before = dict(scene.marks)
        if isinstance(step, Change):
            scene.change(step)
        else:
            scene.apply(batched([step]))
        for user, marks in scene.marks.items():
            assert marks.delivered_seq >= before[user].delivered_seq
            assert marks.read >= before[user].read
            for device, held in before[user].devices.items():
                assert not held - marks.devices[device]


@pytest.mark.promise("I8")
@settings(max_examples=60)
@given(honest(), st.data())
def test_all_of_it_once_more_changes_no_mark(history: History, data: st.DataObject) -> None:
    """In any order, twice, cut anywhere, after heads have grown and members have left and come back."""
    scene = play(history)
    before = dict(scene.marks)
    again = data.draw(shuffled([step for step in history.steps if not isinstance(step, Change)]))
    for batch in again.batches():
        assert not isinstance(batch, Change)
        scene.apply(batched(batch))
    assert scene.marks == before


def play(history: History, watch: Callable[[list[Held | Mark], Scene], bool] | None = None) -> Scene:
    """The scene at the end; ``watch`` may end it before a batch."""
    scene = Scene()
    for batch in history.batches():
        if isinstance(batch, Change):
            scene.change(batch)
        else:
            if watch is not None and watch(batch, scene):
                break
            scene.apply(batched(batch))
    return scene


def _counts(reason: str, kind: str) -> Callable[[History], bool]:
    return lambda history: play(history).counted[kind, reason] > 0


def _before(told: Callable[[list[Held | Mark], Scene], bool]) -> Callable[[History], bool]:
    def found(history: History) -> bool:
        hits: list[bool] = []
        play(history, lambda batch, scene: hits.append(told(batch, scene)) or False)
        return any(hits)

    return found


def _is_doubled(history: History) -> bool:
    said = [step for step in history.steps if not isinstance(step, Change)]
    return len(set(map(repr, said))) < len(said)


def _is_late(history: History) -> bool:
    """Said again when the head has grown meanwhile."""
    steps = history.steps
    return any(
        steps[at] in steps[:before]
        for before, change in enumerate(steps)
        if isinstance(change, Change) and change.grow
        for at in range(before + 1, len(steps))
        if not isinstance(steps[at], Change)
    )


def _has_devices_side_by_side(batch: list[Held | Mark], _: Scene) -> bool:
    devices = [(ack.user_id, ack.device_id) for ack in batch if isinstance(ack, Held)]
    return any(one != other and one[0] == other[0] for one in devices for other in devices)


def _jumps(batch: list[Held | Mark], scene: Scene) -> bool:
    return any(isinstance(ack, Mark) and ack.version > scene.marks[ack.user_id].read[0] + 1 for ack in batch)


def _acks_what_was_missed(batch: list[Held | Mark], scene: Scene) -> bool:
    """Somebody who has left and come back acks what was written in between, too."""
    for ack in batch:
        visible = scene.visible[ack.user_id]
        if isinstance(ack, Held) and visible is not None and len(visible) > 1 and visible.highest == OPEN:
            low, high = visible.lowest or 0, max(start for start, _ in visible)
            if ack.ranges & RangeSet([(low, high)]) - visible:
                return True
    return False


@pytest.mark.parametrize(
    ("word", "is_it"),
    [
        ("late", _is_late),
        ("doubled", _is_doubled),
        ("reordered: an older mark behind a newer one", _counts("stale", "read")),
        ("concurrent devices", _before(_has_devices_side_by_side)),
        ("version jumps", _before(_jumps)),
        ("acks beyond the head", _counts("beyond_head", "delivered")),
        ("marks beyond the head", _counts("beyond_head", "read")),
        ("acks of what is not visible", _counts("invisible", "delivered")),
        ("marks on what is not visible", _counts("invisible", "unread")),
        ("who left and came back", _before(_acks_what_was_missed)),
        ("heads growing in between", lambda history: play(history).head > Scene().head),
        ("a batch of several", _before(lambda batch, _: len(batch) > 2)),
    ],
)
def test_the_histories_hold_every_word_of_the_rule(word: str, is_it: Callable[[History], bool]) -> None:
    once = settings(max_examples=4_000, database=None, phases=[Phase.generate])
    find(histories(), is_it, settings=once, random=random.Random(word))


@pytest.mark.promise("protocol.5.read_unread_apart")
@given(st.lists(acks, max_size=20))
def test_reading_and_delivered_say_nothing_of_each_other(history: list[Held | Mark]) -> None:
    whole = ends_with(history)
    only_held = ends_with([ack for ack in history if isinstance(ack, Held)])
    only_marks = ends_with([ack for ack in history if isinstance(ack, Mark)])
    for user, marks in whole.items():
        assert marks == replace(only_held[user], read=only_marks[user].read)


def test_delivered_needs_all_that_is_visible_below_on_some_device() -> None:
    view = View(RangeSet([(1, 3), (6, OPEN)]), 10)
    marks, gained = deliver(Marks(), "phone", RangeSet([(1, 2), (7, 8)]), view)
    assert (marks.delivered_seq, gained) == (2, 4)
    marks, gained = deliver(marks, "laptop", RangeSet([(2, 6)]), view)
    assert (marks.delivered_seq, gained) == (8, 3)
    assert marks.devices == {"phone": RangeSet([(1, 2), (7, 8)]), "laptop": RangeSet([(2, 3), (6, 6)])}


def test_a_repeat_gains_nothing() -> None:
    marks, gained = deliver(Marks(), "phone", RangeSet([(1, 4)]), ALL)
    assert gained == 4
    assert deliver(marks, "phone", RangeSet([(2, 3)]), ALL) == (marks, 0)
    assert deliver(marks, "laptop", RangeSet([(2, 5)]), ALL)[1] == 4


@pytest.mark.parametrize(
    ("held", "view", "counts", "reason"),
    [
        ([(1, 10)], ALL, [(1, 10)], None),
        ([(9, 12)], ALL, [(9, 10)], "beyond_head"),
        ([(9, OPEN)], ALL, [(9, 10)], "beyond_head"),
        ([(1, 6)], View(RangeSet([(5, OPEN)]), 10), [(5, 6)], None),
        ([(1, 4)], View(RangeSet([(5, OPEN)]), 10), [], "invisible"),
        ([(4, 9)], View(RangeSet([(1, 3)]), 10), [], "invisible"),
        ([(11, 12)], ALL, [], "beyond_head"),
        ([(1, 2)], View(None, 10), [], "invisible"),
    ],
)
def test_an_ack_counts_for_what_is_visible_up_to_the_head(
    held: list[tuple[int, int]], view: View, counts: list[tuple[int, int]], reason: str | None
) -> None:
    assert countable(RangeSet(held), view) == RangeSet(counts)
    assert ignored(RangeSet(held), view) == reason


@pytest.mark.promise("protocol.5.read_mark")
@pytest.mark.parametrize(
    ("present", "kind", "pair", "refusal"),
    [
        ((0, 0), "read", (0, 3), None),
        ((0, 3), "read", (0, 3), "stale"),
        ((0, 3), "read", (0, 2), "stale"),
        ((0, 3), "unread", (1, 1), None),
        ((1, 1), "read", (0, 9), "stale"),
        ((1, 1), "read", (1, 9), None),
        ((1, 1), "unread", (1, 0), "stale"),
        ((1, 1), "unread", (2, 0), None),
        ((0, 3), "unread", (7, 2), None),
        ((0, 3), "read", (0, 11), "beyond_head"),
        ((0, 3), "read", (9, 11), "beyond_head"),
        ((0, 10), "read", (0, 10), "stale"),
    ],
)
def test_a_mark_is_taken_if_and_only_if_its_pair_is_larger(
    present: tuple[int, int], kind: str, pair: tuple[int, int], refusal: str | None
) -> None:
    before = Marks(read=present)
    after, got = propose(before, kind, pair, ALL)  # type: ignore[arg-type]
    assert got == refusal
    assert after.read == (present if refusal else pair)


@pytest.mark.parametrize(
    ("visible", "kind", "pair", "refusal"),
    [
        (RangeSet([(5, OPEN)]), "read", (0, 4), "invisible"),
        (RangeSet([(5, OPEN)]), "unread", (1, 0), None),
        (RangeSet([(1, 6)]), "read", (0, 6), None),
        (RangeSet([(1, 6)]), "read", (0, 7), "invisible"),
        (RangeSet([(1, 6)]), "read", (0, 11), "beyond_head"),
        (None, "read", (0, 1), "invisible"),
        (None, "unread", (1, 0), "invisible"),
    ],
)
def test_a_mark_on_what_may_not_be_seen_is_refused(
    visible: RangeSet | None, kind: str, pair: tuple[int, int], refusal: str | None
) -> None:
    assert propose(Marks(), kind, pair, View(visible, 10))[1] == refusal  # type: ignore[arg-type]
