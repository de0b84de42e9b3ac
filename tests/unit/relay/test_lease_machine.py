"""Leases under every schedule: relays that sleep, die and come back, statements that are slow or whose answer is lost.

The table stands for Postgres: it has the one clock that decides, and takes what `services/relay/shards.sql` takes. All
else is the relay's own: what it plans, what it holds, and for how long it trusts a lease by a clock of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.relay.held import HeldShard
from services.relay.lease import SHARDS, Timing, plan, quota
from services.relay.shards import Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

NAMES = ("ann", "ben", "cid", "dan", "eve")
ROUNDING_S = 1e-6


@dataclass
class Row:
    """A lease row. ``moved_under``: the epoch that moved its cursor last."""

    owner: str | None = None
    epoch: int = 0
    lease_until: float | None = None
    moved_under: int = 0


class Table:
    """The lease rows and who said that it lives, under one clock (seconds)."""

    def __init__(self, lease_s: float) -> None:
        self.now = 0.0
        self.rows = {number: Row() for number in range(SHARDS)}
        self.seen_until: dict[str, float] = {}
        self._lease_s = lease_s

    def announce(self, owner: str) -> None:
        self.seen_until[owner] = self.now + self._lease_s

    def live_owners(self) -> set[str]:
        return {owner for owner, until in self.seen_until.items() if until > self.now}

    def take(self, owner: str, at_most: int) -> list[Taken]:
        free = [n for n, row in self.rows.items() if row.lease_until is None or row.lease_until < self.now]
        return self._take(owner, free[:at_most])

    def take_own(self, owner: str) -> list[Taken]:
        return self._take(owner, [number for number, row in self.rows.items() if row.owner == owner])

    def _take(self, owner: str, numbers: Collection[int]) -> list[Taken]:
        for number in numbers:
            row = self.rows[number]
            row.owner, row.epoch, row.lease_until = owner, row.epoch + 1, self.now + self._lease_s
        return [Taken(number, self.rows[number].epoch, 0) for number in numbers]

    def renew(self, owner: str, epochs: Mapping[int, int]) -> set[int]:
        mine = self._of(owner, epochs)
        for number in mine:
            self.rows[number].lease_until = self.now + self._lease_s
        return mine

    def give_back(self, owner: str, epochs: Mapping[int, int]) -> set[int]:
        mine = self._of(owner, epochs)
        for number in mine:
            self.rows[number].owner = self.rows[number].lease_until = None
        return mine

    def advance(self, owner: str, number: int, epoch: int) -> bool:
        moved = bool(self._of(owner, {number: epoch}))
        if moved:
            self.rows[number].moved_under = epoch
        return moved

    def _of(self, owner: str, epochs: Mapping[int, int]) -> set[int]:
        return {n for n, epoch in epochs.items() if (self.rows[n].owner, self.rows[n].epoch) == (owner, epoch)}


@dataclass
class Statement:
    """Under way: ``run`` at the table, then ``answered`` with its result at the relay. Each once, in this order."""

    run: Callable[[], object]
    answered: Callable[[object], None]
    result: object = None
    has_run: bool = False


@dataclass
class Relay:
    """One process: what `Holder` does, a statement at a time."""

    name: str
    clock: float
    """Its own clock differs from the table's by so much."""
    held: dict[int, HeldShard] = field(default_factory=dict)
    began: bool = False
    renewed_at: float = -math.inf
    statement: Statement | None = None
    asleep: bool = False
    under_way: dict[HeldShard, float] = field(default_factory=dict)
    """Batches with Kafka, and the latest time at which each has ended, by its own clock."""


class Leases(RuleBasedStateMachine):
    """Relays on one table, in any order of what they and the network do."""

    @initialize(
        timing=st.sampled_from([Timing(15, 8), Timing(3, 1.5), Timing(2.5, 1.0), Timing(9.25, 8.2)]),
    )
    def begin(self, timing: Timing) -> None:
        assert timing.problem() is None
        self.timing = timing
        self.table = Table(timing.lease_s)
        self.relays: dict[str, Relay] = {}
        self.orphans: list[Statement] = []
        self.taken_by_dead: set[tuple[int, int]] = set()
        self.epochs = dict.fromkeys(range(SHARDS), 0)

    # What happens around them.

    @precondition(lambda self: len(self.relays) < len(NAMES))
    @rule(data=st.data(), clock=st.sampled_from([0.0, -1_000.0, 86_400.0]))
    def join(self, data: st.DataObject, clock: float) -> None:
        """A new one, or a dead one under its old name."""
        name = data.draw(st.sampled_from([name for name in NAMES if name not in self.relays]))
        self.relays[name] = Relay(name, clock)

    @precondition(lambda self: self.relays)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        relay = self.relays.pop(self.some(data).name)
        if relay.statement is not None and not relay.statement.has_run:
            self.orphans.append(relay.statement)

    @precondition(lambda self: self.orphans)
    @rule()
    def a_dead_ones_statement_runs(self) -> None:
        """It may take anew what the next one under the same name holds: that one is fenced, and nobody acts instead."""
        before = {number: row.epoch for number, row in self.table.rows.items()}
        self.orphans.pop(0).run()
        self.taken_by_dead |= {(n, row.epoch) for n, row in self.table.rows.items() if row.epoch != before[n]}

    @precondition(lambda self: self.relays)
    @rule(data=st.data())
    def sleep_or_wake(self, data: st.DataObject) -> None:
        relay = self.some(data)
        relay.asleep = not relay.asleep

    @rule(share=st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.1]))
    def time_passes(self, share: float) -> None:
        """A share of a lease."""
        self.let_pass(share * self.timing.lease_s)

    @precondition(lambda self: self.trusting())
    @rule(data=st.data())
    def time_passes_until_the_last_moment(self, data: st.DataObject) -> None:
        """At which somebody may still send."""
        relay, shard = data.draw(st.sampled_from(self.trusting()))
        last = shard.trusted_until - self.timing.longest_s - ROUNDING_S / 2
        self.let_pass(max(0.0, last - self.local(relay)))

    # What a relay does.

    @precondition(lambda self: any(relay.statement is None for relay in self.awake()))
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Send the next statement."""
        self.send_next(data.draw(st.sampled_from([relay for relay in self.awake() if relay.statement is None])))

    @precondition(lambda self: self.awake())
    @rule(data=st.data(), statements=st.integers(1, 8))
    def go_on_without_trouble(self, data: st.DataObject, statements: int) -> None:
        """So many statements, each answered at once."""
        self.go_on(data.draw(st.sampled_from(self.awake())), statements)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def statement_runs(self, data: st.DataObject) -> None:
        """Also that of a relay that sleeps."""
        self.run(data.draw(st.sampled_from(self.running())))

    @precondition(lambda self: self.answerable())
    @rule(data=st.data(), lost=st.booleans())
    def statement_is_answered(self, data: st.DataObject, lost: bool) -> None:
        relay = data.draw(st.sampled_from(self.answerable()))
        if lost:
            relay.statement = None
        else:
            self.answer(relay)

    @precondition(lambda self: self.sendable())
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """A batch to Kafka."""
        relay, shard = data.draw(st.sampled_from(self.sendable()))
        relay.under_way[shard] = self.local(relay) + self.timing.longest_s

    @precondition(lambda self: any(relay.under_way for relay in self.awake()))
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        """Kafka has it: the cursor moves, if it is still this relay's to move."""
        relay = data.draw(st.sampled_from([relay for relay in self.awake() if relay.under_way]))
        shard = data.draw(st.sampled_from(list(relay.under_way)))
        del relay.under_way[shard]
        self.advance(relay, shard)

    @precondition(lambda self: any(relay.held for relay in self.awake()))
    @rule(data=st.data())
    def a_late_move(self, data: st.DataObject) -> None:
        """A cursor's move that waited for long, under the epoch of its time."""
        relay = data.draw(st.sampled_from([relay for relay in self.awake() if relay.held]))
        self.advance(relay, data.draw(st.sampled_from(list(relay.held.values()))))

    # How.

    def let_pass(self, seconds: float) -> None:
        self.table.now += seconds
        for relay in self.awake():
            self.end_batches(relay)

    def some(self, data: st.DataObject) -> Relay:
        return data.draw(st.sampled_from(list(self.relays.values())))

    def awake(self) -> list[Relay]:
        return [relay for relay in self.relays.values() if not relay.asleep]

    def running(self) -> list[Relay]:
        return [r for r in self.relays.values() if r.statement is not None and not r.statement.has_run]

    def answerable(self) -> list[Relay]:
        return [relay for relay in self.awake() if relay.statement is not None and relay.statement.has_run]

    def trusting(self) -> list[tuple[Relay, HeldShard]]:
        """Who may hand over a batch of which shard now."""
        return [
            (relay, shard)
            for relay in self.relays.values()
            for shard in relay.held.values()
            if not shard.ended and self.timing.may_send(shard.trusted_until, self.local(relay))
        ]

    def sendable(self) -> list[tuple[Relay, HeldShard]]:
        return [one for one in self.trusting() if not one[0].asleep and one[1] not in one[0].under_way]

    def local(self, relay: Relay) -> float:
        return self.table.now + relay.clock

    def end_batches(self, relay: Relay) -> None:
        """A batch is confirmed or given up by its time."""
        for shard in [shard for shard, until in relay.under_way.items() if until <= self.local(relay)]:
            del relay.under_way[shard]

    def advance(self, relay: Relay, shard: HeldShard) -> None:
        row = self.table.rows[shard.number]
        before = row.moved_under
        if self.table.advance(relay.name, shard.number, shard.epoch):
            assert shard.epoch == row.epoch >= before
        else:
            assert row.owner != relay.name or row.epoch > shard.epoch, "only what is another's by now is refused"
            assert row.moved_under == before
            shard.lose()

    def send_next(self, relay: Relay) -> None:
        """The next step of `Holder`."""
        self.end_batches(relay)
        for number in [number for number, shard in relay.held.items() if shard.lost]:
            del relay.held[number]
        table, name, sent_at = self.table, relay.name, self.local(relay)
        if not relay.began:

            def began(taken: object) -> None:
                relay.began = True
                self.hold(relay, taken, sent_at)

            relay.statement = Statement(lambda: table.take_own(name), began)
        elif sent_at >= relay.renewed_at + self.timing.renew_every_s:
            epochs = {shard.number: shard.epoch for shard in relay.held.values()}

            def renew() -> set[int]:
                table.announce(name)
                return table.renew(name, epochs)

            relay.statement = Statement(renew, lambda renewed: self.renewed(relay, epochs, renewed, sent_at))
        elif ended := [shard for shard in relay.held.values() if shard.leaving and shard not in relay.under_way]:
            epochs = {shard.number: shard.epoch for shard in ended}
            relay.statement = Statement(lambda: table.give_back(name, epochs), lambda _: self.dropped(relay, ended))
        else:
            relay.statement = Statement(table.live_owners, lambda live: self.rebalance(relay, live))

    def rebalance(self, relay: Relay, live: object) -> None:
        assert isinstance(live, set)
        todo = plan(relay.name, live, [number for number, shard in relay.held.items() if not shard.leaving])
        for number in todo.give_up:
            relay.held[number].leave()
        if todo.take:
            sent_at, table = self.local(relay), self.table
            relay.statement = Statement(
                lambda: table.take(relay.name, todo.take), lambda taken: self.hold(relay, taken, sent_at)
            )

    def go_on(self, relay: Relay, statements: int) -> None:
        for _ in range(statements):
            if relay.statement is None:
                self.send_next(relay)
            assert relay.statement is not None
            if not relay.statement.has_run:
                self.run(relay)
            self.answer(relay)

    def run(self, relay: Relay) -> None:
        assert relay.statement is not None
        relay.statement.result = relay.statement.run()
        relay.statement.has_run = True

    def answer(self, relay: Relay) -> None:
        statement, relay.statement = relay.statement, None
        assert statement is not None
        statement.answered(statement.result)

    def hold(self, relay: Relay, taken: object, sent_at: float) -> None:
        assert isinstance(taken, list)
        for one in taken:
            relay.held[one.shard] = HeldShard(one, self.timing.trusted_until(sent_at))

    def renewed(self, relay: Relay, epochs: Mapping[int, int], renewed: object, sent_at: float) -> None:
        assert isinstance(renewed, set)
        relay.renewed_at = sent_at
        for number, epoch in epochs.items():
            shard = relay.held.get(number)
            if shard is not None and shard.epoch == epoch:
                if number in renewed:
                    shard.trusted_until = self.timing.trusted_until(sent_at)
                else:
                    shard.lose()

    def dropped(self, relay: Relay, shards: Collection[HeldShard]) -> None:
        for shard in shards:
            if relay.held.get(shard.number) is shard:
                del relay.held[shard.number]

    # What always holds.

    @invariant()
    def nobody_else_holds_what_is_trusted(self) -> None:
        """Who may send owns the shard by the database's clock too, until the batch has surely ended."""
        trusting = self.trusting()
        for relay, shard in trusting:
            row = self.table.rows[shard.number]
            assert row.owner == relay.name
            assert row.epoch == shard.epoch or (shard.number, row.epoch) in self.taken_by_dead
            assert row.lease_until is not None
            assert row.lease_until + ROUNDING_S >= self.table.now + self.timing.longest_s
        assert len({shard.number for _, shard in trusting}) == len(trusting)

    @invariant()
    def a_batch_ends_within_its_lease(self) -> None:
        """As long as its relay is awake: one that sleeps is what the epochs are for."""
        for relay in self.awake():
            for shard in relay.under_way:
                row = self.table.rows[shard.number]
                assert row.owner == relay.name
                assert row.epoch == shard.epoch or (shard.number, row.epoch) in self.taken_by_dead

    @invariant()
    def no_epoch_goes_back(self) -> None:
        for number, row in self.table.rows.items():
            assert row.epoch >= self.epochs[number]
            assert row.moved_under <= row.epoch
            self.epochs[number] = row.epoch

    # What comes of it once all is quiet.

    def teardown(self) -> None:
        for relay in self.relays.values():
            relay.asleep = False
            relay.statement = None
        if not self.relays:
            return
        # A dead one counts, and holds its shards, for a lease; then it takes two looks at most.
        self.settle(self.timing.lease_s + 1)
        self.all_is_shared()
        joining = next((name for name in NAMES if name not in self.relays), None)
        if joining is None:
            return
        epochs = {number: row.epoch for number, row in self.table.rows.items()}
        self.relays[joining] = Relay(joining, 7.0)
        self.settle(self.timing.longest_s + self.timing.renew_every_s + 1)
        self.all_is_shared()
        moved = {number for number, row in self.table.rows.items() if row.epoch != epochs[number]}
        assert moved == set(self.relays[joining].held), "those that need not move did not"
        assert all(self.table.rows[number].epoch == epochs[number] + 1 for number in moved)

    def settle(self, seconds: float) -> None:
        """All go on as they should for so long."""
        until = self.table.now + seconds
        while self.table.now < until:
            self.table.now += self.timing.look_every_s
            for relay in self.relays.values():
                self.go_on(relay, 5)
            self.nobody_else_holds_what_is_trusted()
            self.no_epoch_goes_back()

    def all_is_shared(self) -> None:
        live = set(self.relays)
        numbers = [len(relay.held) for relay in self.relays.values()]
        assert sum(numbers) == SHARDS
        assert max(numbers) - min(numbers) <= 1
        for name, relay in self.relays.items():
            assert len(relay.held) == quota(name, live)
            for number, shard in relay.held.items():
                assert (self.table.rows[number].owner, self.table.rows[number].epoch) == (name, shard.epoch)
                assert self.timing.may_send(shard.trusted_until, self.local(relay))


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
