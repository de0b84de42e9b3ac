from hypothesis import given
from hypothesis import strategies as st

from services.relay.drawn import FORGET_S, Drawn

OWN_SHARDS = range(3)


def begun() -> Drawn:
    """Nothing was drawn before."""
    drawn = Drawn()
    assert not drawn.up_to(0, 0)
    return drawn


def test_a_drawn_id_is_awaited_until_it_is_read() -> None:
    drawn = begun()
    assert drawn.all_read(0)
    assert drawn.up_to(5, 0)
    drawn.read(1, [1, 2, 4], 0)
    assert not drawn.all_read(1)
    drawn.read(2, [3], 1)
    assert not drawn.all_read(1)
    drawn.read(3, [5], 1)
    assert drawn.all_read(1)


def test_what_is_read_again_counts_once() -> None:
    drawn = begun()
    drawn.up_to(3, 0)
    drawn.read(1, [1, 2], 0)
    drawn.read(1, [1, 2], 0)
    drawn.read(1, [2], 0)
    assert not drawn.all_read(1)


def test_what_is_read_above_the_last_value_seen_stands_for_no_other_id() -> None:
    drawn = begun()
    drawn.up_to(2, 0)
    drawn.read(1, [1, 3], 0)
    assert not drawn.all_read(0)


def test_an_id_that_never_comes_is_forgotten_and_may_still_come() -> None:
    drawn = begun()
    drawn.up_to(2, 10)
    drawn.read(1, [2], 10)
    assert not drawn.all_read(10 + FORGET_S - 0.01)
    assert drawn.all_read(10 + FORGET_S)
    drawn.read(3, [1], 30)
    assert drawn.all_read(30)
    assert drawn.up_to(3, 31)
    assert not drawn.all_read(31)


def test_what_was_drawn_before_the_start_is_not_awaited() -> None:
    drawn = Drawn()
    assert not drawn.up_to(1000, 0)
    assert drawn.all_read(0)
    drawn.read(1, [7, 8], 0)
    assert drawn.all_read(0)
    assert drawn.up_to(1001, 0)
    assert not drawn.all_read(0)


def test_an_id_that_never_comes_is_forgotten_while_others_come() -> None:
    drawn = begun()
    drawn.up_to(1, 0)
    waited = 0
    for id_ in range(2, 400):
        now = id_ / 10
        drawn.up_to(id_, now)
        assert not drawn.all_read(now)
        drawn.read(1, [id_], now)
        waited += not drawn.all_read(now)
    assert FORGET_S * 10 <= waited <= 2 * FORGET_S * 10 + 1


def test_a_store_that_was_set_back_is_begun_anew() -> None:
    drawn = begun()
    drawn.up_to(100, 0)
    drawn.read(1, list(range(1, 101)), 0)
    assert drawn.all_read(0)
    drawn.up_to(50, 1)
    assert drawn.all_read(1)
    assert drawn.up_to(51, 2)
    assert not drawn.all_read(2)
    drawn.read(1, [51], 2)
    assert drawn.all_read(2)


def test_a_closed_partition_leaves_nothing_to_be_awaited() -> None:
    drawn = begun()
    drawn.up_to(5, 0)
    assert drawn.up_to((1 << 26) - 1, 1)
    assert drawn.all_read(1)
    drawn.up_to(1 << 26, 1)
    assert not drawn.all_read(1)


@given(st.lists(st.sampled_from(OWN_SHARDS), max_size=30), st.data())
def test_all_is_read_exactly_if_every_id_was(shards: list[int], data: st.DataObject) -> None:
    """Transactions of any length commit in any order; a shard's ids are read in order, some again."""
    drawn = begun()
    waiting = {shard: [id_ for id_, own in enumerate(shards, 1) if own == shard] for shard in OWN_SHARDS}
    read = 0
    drawn.up_to(len(shards), 0)
    while read < len(shards):
        assert not drawn.all_read(1)
        shard = data.draw(st.sampled_from([shard for shard, ids in waiting.items() if ids]))
        count = data.draw(st.integers(1, len(waiting[shard])))
        ids, waiting[shard] = waiting[shard][:count], waiting[shard][count:]
        drawn.read(shard, ids, 1)
        if data.draw(st.booleans()):
            drawn.read(shard, ids, 1)
        read += count
    assert drawn.all_read(1)
