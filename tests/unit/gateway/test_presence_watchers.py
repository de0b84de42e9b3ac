"""Who hears of whose presence, what, and how often."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.gateway.presence_state import LEAVING, OFFLINE, ONLINE, UNKNOWN, News
from services.gateway.presence_watchers import Watchers
from tests.told import Told

LIFE_S, GRACE_S = 50.0, 10.0
SINCE = str(1_700_000_000_000_000)


@pytest.fixture
def watchers() -> Watchers:
    made = Watchers(life_s=LIFE_S, grace_s=GRACE_S)
    made.renewed(0.0)
    return made


def say(watchers: Watchers) -> None:
    for session, frame in watchers.frames():
        session.write(frame)


def check(watchers: Watchers, *shares: str, now: float = 0.0) -> None:
    for one in watchers.unchecked(1000):
        watchers.checked(one, set(shares) & set(one.users), now)


def watching(watchers: Watchers, *users: str, state: int = ONLINE, now: float = 0.0, me: str = "ann") -> Told:
    """A session that was told of users with whom it shares a conversation."""
    session = Told(me)
    watchers.want(session, users)
    check(watchers, *users, now=now)
    for user_id in watchers.due(now, 1000):
        watchers.answered(user_id, News(state, SINCE, 1), LIFE_S, now)
    say(watchers)
    return session


def test_each_user_of_the_list_is_answered_once(watchers: Watchers) -> None:
    session = Told("ann")
    watchers.want(session, ["bob", "cyd", "eve", "bob"])
    check(watchers, "bob", "cyd")
    say(watchers)
    assert session.states == {"eve": (None, None)}, "a stranger is unknown at once"
    assert sorted(watchers.due(0.0, 10)) == ["bob", "cyd"]
    assert watchers.due(0.0, 10) == []
    watchers.answered("bob", News(ONLINE, SINCE, 1), LIFE_S, 0.0)
    watchers.answered("cyd", News(OFFLINE, "", 1), -1, 0.0)
    say(watchers)
    assert session.states == {
        "bob": (True, "2023-11-14T22:13:20.000000Z"),
        "cyd": (False, None),
        "eve": (None, None),
    }
    assert len(session.frames) == 3


def test_a_change_is_told_once_to_all_who_may_know(watchers: Watchers) -> None:
    one, two = watching(watchers, "bob"), watching(watchers, "bob")
    stranger = Told("zoe")
    watchers.want(stranger, ["bob"])
    check(watchers)
    say(watchers)
    assert two.online("bob") == [True], "known already: answered without asking"
    watchers.heard("bob", News(OFFLINE, SINCE, 2), 1.0)
    watchers.heard("bob", News(OFFLINE, SINCE, 2), 1.0)
    say(watchers)
    assert [one.online("bob"), two.online("bob")] == [[True, False]] * 2
    assert stranger.online("bob") == [None]


def test_a_later_list_replaces_the_earlier_one(watchers: Watchers) -> None:
    session = watching(watchers, "bob", "cyd")
    watchers.want(session, ["cyd"])
    check(watchers, "cyd")
    watchers.due(0.0, 10)
    watchers.answered("cyd", News(ONLINE, SINCE, 2), LIFE_S, 0.0)
    watchers.heard("bob", News(OFFLINE, SINCE, 2), 1.0)
    say(watchers)
    assert session.online("bob") == [True]
    assert session.online("cyd") == [True, True]
    watchers.want(session, [])
    watchers.heard("cyd", News(OFFLINE, SINCE, 3), 1.0)
    say(watchers)
    assert session.online("cyd") == [True, True]
    assert len(watchers) == 0


def test_nothing_is_kept_of_a_session_that_ended(watchers: Watchers) -> None:
    session = watching(watchers, "bob")
    watchers.want(session, ["bob", "cyd"])
    checks = watchers.unchecked(10)
    watchers.ended(session)
    watchers.ended(session)
    for one in checks:
        watchers.checked(one, {"bob"}, 0.0)
    watchers.not_checked(checks)
    say(watchers)
    assert len(session.frames) == 1
    assert len(watchers) == 0
    assert watchers._wants == watchers._unchecked == watchers._checked == watchers._of_user == {}


def test_a_check_of_an_older_list_does_not_count(watchers: Watchers) -> None:
    session = Told("ann")
    watchers.want(session, ["bob"])
    (old,) = watchers.unchecked(10)
    watchers.want(session, ["bob", "cyd"])
    watchers.checked(old, {"bob"}, 0.0)
    assert watchers.due(0.0, 10) == []
    check(watchers, "bob")
    say(watchers)
    assert session.states == {"cyd": (None, None)}


def test_who_leaves_is_asked_for_after_its_grace(watchers: Watchers) -> None:
    session = watching(watchers, "bob")
    watchers.heard("bob", News(LEAVING, "", 2), 5.0)
    assert watchers.due(5.0 + GRACE_S, 10) == []
    assert watchers.due(5.0 + GRACE_S + 1, 10) == ["bob"]
    watchers.answered("bob", News(ONLINE, SINCE, 3), LIFE_S, 16.0)
    say(watchers)
    assert session.online("bob") == [True], "it came back: no news"


def test_everybody_is_asked_again_before_its_time_is_over(watchers: Watchers) -> None:
    watching(watchers, "bob", state=ONLINE)
    watching(watchers, "cyd", state=OFFLINE)
    assert sorted(watchers.due(LIFE_S + 1, 10)) == ["bob", "cyd"]
    assert watchers.next_due_in(0.0) == float("inf")
    watchers.not_answered(["bob", "cyd", "gone"], LIFE_S + 1)
    assert sorted(watchers.due(LIFE_S + 1, 10)) == ["bob", "cyd"]


def test_what_was_said_earlier_and_comes_late_is_dropped_unless_the_clock_was_set_back(watchers: Watchers) -> None:
    session = watching(watchers, "bob", state=OFFLINE)
    watchers.heard("bob", News(ONLINE, SINCE, 100_000_000), 1.0)
    watchers.answered("bob", News(OFFLINE, SINCE, 99_999_999), -1, 1.0)
    say(watchers)
    assert session.online("bob") == [False, True]
    watchers.heard("bob", News(OFFLINE, SINCE, 30_000_000), 1.0)
    say(watchers)
    assert session.online("bob") == [False, True, False]


def test_a_store_that_has_lost_all_says_nothing_about_who_was_known(watchers: Watchers) -> None:
    session = watching(watchers, "bob")
    watchers.renewed(2.0)
    assert watchers.due(1.9, 10) == [], "others get time to tell it all again"
    late = Told("cyd")
    watchers.want(late, ["bob", "dan"])
    check(watchers, "bob", "dan", now=1.0)
    assert watchers.due(1.9, 10) == []
    assert sorted(watchers.due(2.0, 10)) == ["bob", "dan"]
    watchers.answered("bob", News(UNKNOWN, "", 9), 1.0, 2.0)
    watchers.answered("dan", News(UNKNOWN, "", 9), 1.0, 2.0)
    say(watchers)
    assert session.online("bob") == [True]
    assert late.online("dan") == [None]
    assert sorted(watchers.due(3.2, 10)) == ["bob", "dan"]
    watchers.answered("dan", News(OFFLINE, "", 10), -1, 3.2)
    say(watchers)
    assert late.online("dan") == [None, False]


def test_an_outage_makes_all_unknown_once_and_the_truth_is_told_after_it(watchers: Watchers) -> None:
    session = watching(watchers, "bob", "cyd")
    waiting = Told("dan")
    watchers.want(waiting, ["bob", "eve"])
    check(watchers, "bob", "eve")
    watchers.away()
    say(watchers)
    assert session.online("bob") == [True], "a short outage is no news"
    assert waiting.states == {"bob": (True, "2023-11-14T22:13:20.000000Z"), "eve": (None, None)}
    watchers.lost()
    watchers.lost()
    late = Told("fay")
    watchers.want(late, ["bob"])
    check(watchers, "bob")
    say(watchers)
    assert [session.online("bob"), waiting.online("bob"), late.online("bob")] == [[True, None], [True, None], [None]]
    assert waiting.online("eve") == [None]
    watchers.renewed(9.0)
    for user_id in watchers.due(9.0, 10):
        watchers.answered(user_id, News(OFFLINE if user_id == "cyd" else ONLINE, SINCE, 9), -1, 9.0)
    say(watchers)
    assert [session.online("bob"), waiting.online("bob"), late.online("bob")] == [
        [True, None, True],
        [True, None, True],
        [None, True],
    ]
    assert session.online("cyd") == [True, None, False]
    assert waiting.online("eve") == [None, True]


def test_before_the_store_was_ever_there_all_is_unknown_at_once() -> None:
    watchers, session = Watchers(life_s=LIFE_S, grace_s=GRACE_S), Told("ann")
    watchers.want(session, ["bob"])
    check(watchers, "bob")
    say(watchers)
    assert session.online("bob") == [None]


def test_while_it_cannot_be_checked_who_may_know_all_is_unknown(watchers: Watchers) -> None:
    session = Told("ann")
    watchers.want(session, ["bob", "eve"])
    for _ in range(3):
        watchers.not_checked(watchers.unchecked(10))
        say(watchers)
    assert session.online("bob") == session.online("eve") == [None]
    check(watchers, "bob")
    watchers.due(0.0, 10)
    watchers.answered("bob", News(ONLINE, SINCE, 1), LIFE_S, 0.0)
    say(watchers)
    assert session.online("bob") == [None, True]
    assert session.online("eve") == [None], "unknown already"


def test_a_changed_membership_is_checked_again_from_both_sides(watchers: Watchers) -> None:
    session, other = watching(watchers, "bob", "cyd"), watching(watchers, "bob", me="zoe")
    watchers.membership_changed("bob")
    assert {(one.session, *one.users) for one in watchers.unchecked(10)} == {(session, "bob"), (other, "bob")}
    watchers.membership_changed("bob")
    check(watchers)
    say(watchers)
    assert session.online("bob") == [True, None]
    watchers.heard("bob", News(OFFLINE, SINCE, 5), 1.0)
    say(watchers)
    assert session.online("bob") == [True, None], "they share nothing any more"
    assert other.online("bob")[-1] is None
    watchers.membership_changed("bob")
    check(watchers, "bob", "cyd", now=2.0)
    assert watchers.due(2.0, 10) == ["bob"], "what is known of it is out of date"
    watchers.answered("bob", News(OFFLINE, SINCE, 6), -1, 2.0)
    say(watchers)
    assert session.online("bob") == [True, None, False]
    watchers.membership_changed("ann")
    ((_, users, _),) = watchers.unchecked(10)
    assert users == {"bob", "cyd"}


def test_old_checks_are_done_again(watchers: Watchers) -> None:
    session = watching(watchers, "bob", now=5.0)
    watchers.check_old(5.0)
    assert watchers.unchecked(10) == []
    watchers.check_old(5.1)
    watchers.check_old(5.1)
    check(watchers, "bob", now=600.0)
    say(watchers)
    assert session.online("bob") == [True]
    watchers.check_old(500.0)
    assert watchers.unchecked(10) == []


USERS = ("a", "b", "c")


class Machine(RuleBasedStateMachine):
    """Sessions, a store, and everything that may come between. A session hears the truth, and each news once.

    ``truth``: what the store would say; ``shares``: whom each session may know of.
    """

    @initialize()
    def begin(self) -> None:
        self.watchers = Watchers(life_s=LIFE_S, grace_s=GRACE_S)
        self.now, self.at = 0.0, 0
        self.up = False
        self.truth: dict[str, tuple[int, str]] = dict.fromkeys(USERS, (OFFLINE, ""))
        self.sessions = [Told(user_id, f"{n}") for n, user_id in enumerate((*USERS, "a"))]
        self.wants: dict[Told, frozenset[str]] = {}
        self.shares = {(one, other) for one in USERS for other in USERS}

    @rule(session=st.integers(0, 3), users=st.sets(st.sampled_from(USERS)))
    def want(self, session: int, users: set[str]) -> None:
        told = self.sessions[session]
        self.watchers.want(told, users)
        self.wants[told] = frozenset(users)
        for user_id in users:
            told.frames = [one for one in told.frames if one["user_id"] != user_id]

    @rule(session=st.integers(0, 3))
    def end(self, session: int) -> None:
        self.watchers.ended(self.sessions[session])
        self.wants.pop(self.sessions[session], None)

    @rule(user_id=st.sampled_from(USERS), state=st.sampled_from((ONLINE, OFFLINE)), heard=st.booleans())
    def change(self, user_id: str, state: int, heard: bool) -> None:
        self.at += 1
        self.truth[user_id] = (state, str(self.at))
        if heard and self.up:
            self.watchers.heard(user_id, News(state, str(self.at), self.at), self.now)

    @rule(one=st.sampled_from(USERS), other=st.sampled_from(USERS))
    def membership(self, one: str, other: str) -> None:
        self.shares ^= {(one, other), (other, one)}
        self.watchers.membership_changed(one)
        self.watchers.membership_changed(other)

    @rule(works=st.booleans())
    def check(self, works: bool) -> None:
        checks = self.watchers.unchecked(2)
        if not works:
            self.watchers.not_checked(checks)
        for one in checks if works else ():
            self.watchers.checked(one, {u for u in one.users if (one.session.user_id, u) in self.shares}, self.now)

    @precondition(lambda self: self.up)
    @rule(works=st.booleans(), known=st.booleans())
    def ask(self, works: bool, known: bool) -> None:
        users = self.watchers.due(self.now, 2)
        if not works:
            self.watchers.not_answered(users, self.now)
        for user_id in users if works else ():
            news = News(*self.truth[user_id], self.at) if known else News(UNKNOWN, "", self.at)
            self.watchers.answered(user_id, news, 1.0, self.now)

    @rule(most=st.integers(0, 3))
    def say(self, most: int) -> None:
        for _, (session, frame) in zip(range(most), self.watchers.frames(), strict=False):
            session.write(frame)

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def renew(self) -> None:
        self.up = True
        self.watchers.renewed(self.now)

    @rule()
    def lose(self) -> None:
        self.up = False
        self.watchers.away()
        self.watchers.lost()

    def teardown(self) -> None:
        """Once all is quiet every session has heard the truth of each user of its list."""
        self.renew()
        for _ in range(3):
            self.now += LIFE_S + 1
            while checks := self.watchers.unchecked(10):
                for one in checks:
                    shares = {user_id for user_id in one.users if (one.session.user_id, user_id) in self.shares}
                    self.watchers.checked(one, shares, self.now)
            while users := self.watchers.due(self.now, 10):
                for user_id in users:
                    self.watchers.answered(user_id, News(*self.truth[user_id], self.at), 1.0, self.now)
            say(self.watchers)
        for told, users in self.wants.items():
            for user_id in users:
                state = self.truth[user_id][0] == ONLINE if (told.user_id, user_id) in self.shares else None
                assert told.online(user_id)[-1:] == [state], (told.user_id, user_id, told.frames)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
