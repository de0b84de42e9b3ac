import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.relay.lease import CLOSE_S, SHARDS, Timing, plan, quota

names = st.text("abcdef", min_size=1, max_size=4)


@given(st.sets(names, min_size=1, max_size=100))
def test_quotas_share_all_shards_evenly(live: set[str]) -> None:
    quotas = [quota(me, live) for me in live]
    assert sum(quotas) == SHARDS
    assert max(quotas) - min(quotas) <= 1


@given(names, st.sets(names, max_size=20), st.sets(st.integers(0, SHARDS - 1)))
def test_a_plan_leads_to_the_quota_and_moves_nothing_else(me: str, live: set[str], held: set[int]) -> None:
    todo = plan(me, live, held)
    assert set(todo.give_up) <= held
    assert len(held) - len(todo.give_up) + todo.take == quota(me, live)
    assert todo.take == 0 or not todo.give_up


class Shares(RuleBasedStateMachine):
    """Relays that come, go and die, each acting by its own plan, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.free = set(range(SHARDS))
        self.held: dict[str, set[int]] = {}
        self.dead: list[set[int]] = []

    @rule(name=names)
    def join(self, name: str) -> None:
        self.held.setdefault(name, set())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.free |= self.held.pop(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.dead.append(self.held.pop(data.draw(st.sampled_from(sorted(self.held)))))

    @precondition(lambda self: self.dead)
    @rule()
    def end_a_lease(self) -> None:
        self.free |= self.dead.pop()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.act(data.draw(st.sampled_from(sorted(self.held))))

    def act(self, name: str) -> None:
        mine = self.held[name]
        todo = plan(name, set(self.held), mine)
        for shard in todo.give_up:
            mine.discard(shard)
            self.free.add(shard)
        for shard in sorted(self.free)[: todo.take]:
            self.free.discard(shard)
            mine.add(shard)

    @invariant()
    def each_shard_is_at_one_place(self) -> None:
        places = [self.free, *self.held.values(), *self.dead]
        assert sorted(shard for place in places for shard in place) == list(range(SHARDS))

    def teardown(self) -> None:
        """Whatever happened: once leases have ended and each has looked twice, all is shared, and then it rests."""
        while self.dead:
            self.end_a_lease()
        if not self.held:
            return
        for _ in range(2):
            for name in self.held:
                self.act(name)
        assert not self.free
        before = {name: set(mine) for name, mine in self.held.items()}
        assert max(map(len, before.values())) - min(map(len, before.values())) <= 1
        for name in self.held:
            self.act(name)
        assert self.held == before


TestShares = Shares.TestCase


durations = st.floats(0.5, 600)


@given(durations, durations, st.floats(0, 1e6))
def test_what_may_be_sent_has_ended_before_the_lease_does(lease_s: float, delivery_s: float, sent_at: float) -> None:
    timing = Timing(lease_s, delivery_s)
    until = timing.trusted_until(sent_at)
    assert until <= sent_at + lease_s
    if timing.problem() is None:
        assert timing.may_send(until, sent_at), "with a fresh lease something can be sent"
        assert timing.renew_every_s > 0
        # Two renewals in a row may be lost without a pause.
        assert timing.may_send(until, sent_at + 2 * timing.renew_every_s)
    assert not timing.may_send(until, until - delivery_s)


def test_a_lease_that_is_too_short_is_told_with_the_sum() -> None:
    assert Timing(15, 8).problem() is None
    assert Timing(9, 8).problem() == (
        "a lease of 9000 ms is not longer than the longest delivery: 8000 (WAYBILL_RELAY_DELIVERY_TIMEOUT_MS: request, "
        "retries and waits between them) + 500 (closing the failed client) + 500 (renewing the lease) = 9000 ms"
    )


@pytest.mark.parametrize(("lease_s", "looks"), [(15, 0.4), (2.5, 0.1)])
def test_a_dead_relays_shards_are_looked_for_often(lease_s: float, looks: float) -> None:
    assert Timing(lease_s, 1.7).look_every_s == pytest.approx(looks)
    assert CLOSE_S < 1
