"""A newer session replaces an older one, and a token that was revoked ends what was opened with it."""

from typing import Any, cast

import pytest

from services.gateway.close import Close
from services.gateway.fanout import Fanout
from services.gateway.limits import Limits, Rate
from services.gateway.metrics import REPLACED, REVOKED
from services.gateway.revocations import Revocation
from services.gateway.social import Social
from shared.auth import Claims
from shared.hints import Revocation as Hint
from tests.followers import Follower
from tests.lone_gateway import Recorder


class Session(Follower):
    """A connection that was opened with a token."""

    def __init__(self, house: "House", user_id: str, device_id: str, number: int, **claims: Any) -> None:
        super().__init__(user_id, device_id)
        self.house = house
        self.number = number
        self.session_id = f"{user_id}-{device_id}-{number}"
        self.claims = Claims(user_id, "user", None, 0.0, **claims)
        self.rates: Any = None
        self.code: int | None = None

    def end(self, close: Any) -> None:
        assert self.code is None
        self.code = close.code
        self.house.fanout.unregister(self)
        self.house.social.closed(cast("Any", self))


class House:
    def __init__(self) -> None:
        self.fanout = Fanout()
        self.presence, self.typing, self.transitions, self.kicks = Recorder(), Recorder(), Recorder(), Recorder()
        self.limits = Limits({"sends": Rate(1.0, 1)}, {})
        parts: Any = (self.fanout, self.presence, self.typing, self.limits, self.transitions)
        self.social = Social(*parts)
        self.social.kicks = cast("Any", self.kicks)

    def open(self, user_id: str = "ann", device_id: str = "phone", number: int = 1, **claims: Any) -> Session:
        session = Session(self, user_id, device_id, number, **claims)
        self.fanout.register(session)
        self.social.opened(cast("Any", session))
        return session


@pytest.fixture
def house() -> House:
    return House()


def count(metric: Any) -> float:
    return float(metric._value.get())


class TestBeginAndEnd:
    def test_others_are_told(self, house: House) -> None:
        session = house.open(number=7)
        assert house.presence.of("opened") == [("ann-phone-7", "ann")]
        assert house.kicks.of("opened") == [("ann", "phone", 7)]
        session.end(Close(1000, "bye"))
        assert house.presence.of("closed") == [("ann-phone-7",)]

    def test_it_has_its_rates_until_it_ends(self, house: House) -> None:
        session = house.open()
        assert session.rates.user_id == "ann"
        session.end(Close(1000, "bye"))
        assert session.rates is None
        house.limits.tidy(1e9)
        assert house.limits._users == {}

    def test_one_that_ended_before_it_was_opened(self, house: House) -> None:
        session = Session(house, "ann", "phone", 0)
        house.social.closed(cast("Any", session))
        assert house.presence.of("closed") == [("ann-phone-0",)]

    def test_without_redis(self, house: House) -> None:
        house.social.kicks = None
        assert house.open().code is None


@pytest.mark.promise("protocol.3.session_number")
class TestReplaced:
    def test_an_older_session_of_the_device_ends(self, house: House) -> None:
        before = count(REPLACED)
        old, tablet, bob = house.open(number=1), house.open(device_id="tablet"), house.open("bob")
        new = house.open(number=2)
        assert [one.code for one in (old, tablet, bob, new)] == [4409, None, None, None]
        assert count(REPLACED) - before == 1
        assert house.transitions.of("note") == [("session", "replaced", "ann", "phone", "ann-phone-1")]
        assert old.rates is None

    def test_an_older_one_that_is_opened_later_ends_itself(self, house: House) -> None:
        new = house.open(number=2)
        old = house.open(number=1)
        assert (new.code, old.code) == (None, 4409)

    def test_a_session_elsewhere_with_a_larger_number_ends_it(self, house: House) -> None:
        session = house.open(number=3)
        for number in (1, 3):
            house.social.replaced("ann", "phone", number)
        house.social.replaced("ann", "tablet", 9)
        house.social.replaced("nobody", "phone", 9)
        assert session.code is None
        house.social.replaced("ann", "phone", 4)
        assert session.code == 4409
        house.social.replaced("ann", "phone", 5)


class TestRevoked:
    @pytest.mark.parametrize(
        ("row", "ends"),
        [
            (Revocation(1, "ann", None, None, 100.0), True),
            (Revocation(1, "ann", "phone", None, 100.0), True),
            (Revocation(1, "ann", "tablet", None, 100.0), False),
            (Revocation(1, "ann", None, None, 50.0), False),
            (Revocation(1, "bob", None, None, 100.0), False),
            (Revocation(1, "ann", None, "t1", 0.0), True),
            (Revocation(1, "ann", None, "t2", 0.0), False),
        ],
    )
    def test_what_it_voids_ends(self, house: House, row: Revocation, ends: bool) -> None:
        session = house.open(issued_at=60.0, token_id="t1")
        before = count(REVOKED)
        house.social.revoke([row])
        assert session.code == (4401 if ends else None)
        assert count(REVOKED) - before == ends

    def test_a_hint_does_the_same(self, house: House) -> None:
        session, other = house.open(issued_at=60.0), house.open("bob", issued_at=60.0)
        house.social.hinted(Hint(user_id="ann", before=100.0))
        assert (session.code, other.code) == (4401, None)

    def test_a_row_that_is_told_again_ends_a_session_that_came_since(self, house: House) -> None:
        row = Revocation(1, "ann", None, None, 100.0)
        house.social.revoke([row])
        late = house.open(issued_at=60.0)
        house.social.revoke([row])
        assert late.code == 4401
        fresh = house.open(issued_at=101.0, number=2)
        house.social.revoke([row, row])
        assert fresh.code is None


def test_what_is_typed_and_watched_is_handed_on(house: House) -> None:
    session = house.open()
    house.social.typed(cast("Any", session), "c")
    house.social.watch(cast("Any", session), ["bob"])
    assert house.typing.of("typed") == [("ann-phone-1", "ann", "c")]
    assert house.presence.of("watch") == [(session, ["bob"])]
