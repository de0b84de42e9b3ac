from hypothesis import given
from hypothesis import strategies as st

from services.relay.held import HeldShard
from services.relay.shards import Taken
from services.relay.tail import Pace


@given(st.floats(0.001, 1), st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_the_wait_is_within_its_bounds_and_short_after_rows(longest_s: float, reads: list[tuple[int, bool]]) -> None:
    pace = Pace(longest_s)
    for rows, more in reads:
        wait = pace.after(rows, more=more)
        assert 0 <= wait <= longest_s
        if rows:
            assert wait == (0 if more else min(0.002, longest_s))


def test_the_wait_grows_while_nothing_comes() -> None:
    pace = Pace(0.01)
    waits = [pace.after(0, more=False) for _ in range(10)]
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] == 0.01
    pace.after(1, more=False)
    assert pace.after(0, more=False) == waits[0]


def shard() -> HeldShard:
    return HeldShard(Taken(3, 1, 10), 0.0)


def rows(*ids: int) -> list[tuple[int, int]]:
    return [(3, id_) for id_ in ids]


def test_rows_of_an_older_position_are_dropped() -> None:
    held = shard()
    held.accept(10, rows(11, 12), 12)
    held.rewind()
    assert (held.read_id, list(held.rows)) == (10, [])
    held.accept(12, rows(13), 13)
    assert (held.read_id, list(held.rows)) == (10, [])
    held.accept(10, rows(11, 12), 12)
    assert held.read_id == 12


def test_it_reads_on_once_half_of_the_last_read_is_gone() -> None:
    held = shard()
    assert held.has_room
    held.accept(10, rows(11, 12, 13, 14), 14)
    assert not held.has_room
    held.rows.popleft()
    assert not held.has_room
    held.rows.popleft()
    assert held.has_room


def test_a_shard_that_has_ended_takes_nothing() -> None:
    for end in (HeldShard.leave, HeldShard.lose):
        held = shard()
        end(held)
        held.accept(10, rows(11), 11)
        assert held.ended
        assert not held.has_room
        assert not held.rows
