"""What a `conversation` frame says, in which order frames come, and how listings are read."""

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.gateway import listing
from services.gateway.listing import (
    Listed,
    Marks,
    Wanted,
    changed_since,
    conversations_of_users,
    list_conversations,
    newest_first,
    store_incarnation,
)
from services.gateway.since import Since, known_since
from shared.errors import UnavailableError
from shared.postgres import to_multirange
from shared.ranges import OPEN, RangeSet
from tests.timelines import Store

LISTED = Listed(
    conversation_id="c",
    kind="group",
    title="T",
    keeps_history=False,
    as_of=9,
    role="member",
    visible=RangeSet([(3, 5), (8, OPEN)]),
    head=9,
    record=4,
    mine=Marks("ann", 4, 5, 2),
    unread=1,
    updated_at="2026-01-02T03:04:05.000006Z",
    peer=None,
)


class TestFrame:
    @pytest.mark.promise("protocol.3.conversation_frame")
    def test_what_it_says(self) -> None:
        assert json.loads(LISTED.frame(4)) == {
            "t": "conversation",
            "conversation_id": "c",
            "kind": "group",
            "title": "T",
            "role": "member",
            "head": 9,
            "visible": [[3, 5], [8, None]],
            "cursor": 4,
            "delivered_seq": 4,
            "read_seq": 5,
            "read_version": 2,
            "unread": 1,
            "updated_at": "2026-01-02T03:04:05.000006Z",
            "muted": False,
            "archived": False,
        }

    @pytest.mark.promise("protocol.3.conversation_frame")
    @pytest.mark.parametrize("reset", [True, False])
    @pytest.mark.parametrize(
        ("until", "archived", "told"),
        [
            (None, True, {"muted": False, "archived": True}),
            ("", False, {"muted": True, "archived": False}),
            ("2026-12-01T08:00:00.000000Z", True, {"muted": True, "muted_until": "2026-12-01T08:00:00.000000Z"}),
        ],
    )
    def test_the_users_own_settings(self, until: str | None, archived: bool, told: dict[str, Any], reset: bool) -> None:
        listed = replace(LISTED, muted_until=until, archived=archived)
        assert listed.muted == told["muted"]
        assert json.loads(listed.frame(4, reset=reset)) == {
            **json.loads(LISTED.frame(4, reset=reset)), "archived": archived, **told
        }  # fmt: skip

    @pytest.mark.promise("protocol.3.reset")
    def test_that_the_client_has_to_begin_anew(self) -> None:
        assert json.loads(LISTED.frame(4, reset=True)) == {**json.loads(LISTED.frame(4)), "reset": True}

    @pytest.mark.parametrize("title", [None, "", 'a "b" \\ \n \x07', "Grüße 👋", "</script>"])
    def test_any_title(self, title: str | None) -> None:
        assert json.loads(replace(LISTED, title=title, updated_at=None).frame(4))["title"] == title

    def test_members_and_former_ones(self) -> None:
        assert LISTED.member
        assert LISTED.first_cursor == 2
        left = replace(LISTED, visible=RangeSet([(3, 5)]))
        assert not left.member
        assert json.loads(left.frame(5))["visible"] == [[3, 5]]

    @pytest.mark.promise("protocol.3.peer_receipt")
    def test_a_peers_receipt(self) -> None:
        assert LISTED.peer_frame() is None
        frame = replace(LISTED, peer=Marks("bob", 1, 2, 3)).peer_frame()
        assert frame is not None
        assert json.loads(frame) == {
            "t": "receipt",
            "conversation_id": "c",
            "user_id": "bob",
            "delivered_seq": 1,
            "read_seq": 2,
            "read_version": 3,
        }

    @pytest.mark.promise("protocol.3.listing_order")
    def test_unread_first_and_newest_first(self) -> None:
        rows = [
            replace(LISTED, conversation_id=name, unread=unread, updated_at=at)
            for name, unread, at in (("a", 0, "2026-09"), ("b", 2, "2026-01"), ("c", 0, None), ("d", 1, "2026-02"))
        ]
        rows.sort(key=newest_first, reverse=True)
        assert [row.conversation_id for row in rows] == ["d", "b", "a", "c"]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=5), st.booleans())
def test_visibility_as_postgres_writes_it(pairs: list[tuple[int, int]], open_ended: bool) -> None:
    visible = RangeSet([(low, low + more) for low, more in pairs] + ([(60, OPEN)] if open_ended else []))
    assert listing._visible(to_multirange(visible)) == visible


@pytest.fixture
def store() -> Store:
    return Store()


def pool(store: Store) -> Any:
    return cast("Any", store)


class TestReads:
    async def test_many_at_once_in_their_order(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listing, "LIST_AT_ONCE", 2)
        for name in "abc":
            store.make(name, "ann", head=ord(name) - ord("a") + 1)
        wanted = [Wanted(user_id, "phone", name) for name in "cab" for user_id in ("ann", "bob")]
        found = await list_conversations(pool(store), wanted)
        heads = [None if row is None else (row.conversation_id, row.head) for row in found.rows]
        assert heads == [("c", 3), None, ("a", 1), None, ("b", 2), None]
        assert store.asked == ["list_conversations"] * 3
        assert found.since == Since(str(store.incarnation), store.xid + 1)

    async def test_nothing_is_asked_for(self, store: Store) -> None:
        assert await list_conversations(pool(store), []) == (None, [])
        assert store.asked == []

    @pytest.mark.promise("protocol.3.reset")
    @pytest.mark.parametrize(
        ("seq", "event_id", "mismatch"),
        [(2, None, False), (2, 2, False), (2, 1, True), (3, 2, True), (0, 1, False)],
    )
    async def test_the_event_at_a_cursor(self, store: Store, seq: int, event_id: int | None, mismatch: bool) -> None:
        of = store.make("c", "ann", head=2)
        name = None if event_id is None else of.event_id(event_id)
        (row,) = (await list_conversations(pool(store), [Wanted("ann", "phone", "c", seq, name)])).rows
        assert row is not None
        assert row.mismatch is mismatch

    @pytest.mark.promise("I7")
    async def test_a_store_that_becomes_another_one_meanwhile(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "LIST_AT_ONCE", 1)
        store.make("c", "ann")
        store.after["list_conversations"].append(lambda: setattr(store, "incarnation", "other"))
        with pytest.raises(UnavailableError, match="replaced"):
            await list_conversations(pool(store), [Wanted("ann", "phone", "c")] * 2)

    async def test_a_standby(self, store: Store) -> None:
        store.make("c", "ann")
        store.incarnation = None
        for read in (
            store_incarnation(pool(store)),
            changed_since(pool(store), [("ann", None)]),
            list_conversations(pool(store), [Wanted("ann", "phone", "c")]),
        ):
            with pytest.raises(UnavailableError, match="standby"):
                await read

    @pytest.mark.promise("protocol.3.hello_since")
    async def test_what_changed_since(self, store: Store) -> None:
        for name in "ab":
            store.make(name, "ann", head=2)
        then = store.xid + 1
        store.of["b"].write()
        changes = await changed_since(pool(store), [("ann", then), ("ann", None), ("bob", None)])
        assert changes.since == Since(str(store.incarnation), store.xid + 1)
        assert changes.users == [
            (["a", "b"], [2, 3], [False, True]),
            (["a", "b"], [2, 3], [True, True]),
            ([], [], []),
        ]

    async def test_whose_conversations_they_are(self, store: Store) -> None:
        store.make("a", "ann", "bob")
        store.make("b", "ann")
        assert await conversations_of_users(pool(store), ["ann", "bob", "cyd"]) == {
            "ann": ["a", "b"],
            "bob": ["a"],
            "cyd": [],
        }

    async def test_a_store_that_is_away(self, store: Store) -> None:
        store.fails["changed_since"].append(OSError())
        with pytest.raises(UnavailableError):
            await changed_since(pool(store), [("ann", None)])


@pytest.mark.promise("protocol.3.hello_since")
@pytest.mark.parametrize(
    ("text", "xmin"),
    [
        (None, None),
        ("", None),
        ("junk", None),
        ("AB-1.17", 17),
        ("ab-1.17", 17),
        ("ab-2.17", None),
        ("ab-1.99999999999999999999", None),
        ("ab-1.-7", None),
    ],
)
def test_a_since_of_this_store_or_of_none(text: str | None, xmin: int | None) -> None:
    assert known_since(text, "AB-1") == xmin
