"""What a sweep makes of rows, and what it remembers of Kafka's records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.judge import Judge
from services.gateway.metrics import SWEEP_FINDS
from services.gateway.sweep_rules import Change, ChangeRecords, ReceiptRecords, Row, Turn, folded
from shared.errors import UnavailableError

NOTHING = dict.fromkeys(("shard", "id", "seq", "conversation_id", "text"))


def row(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **NOTHING, **fields}


def test_rows_are_folded() -> None:
    turn = folded(
        [
            row("change", shard=2, id=9, seq=4, conversation_id="c", text="waybill.event.member"),
            row("store", text="s-1"),
            row("end", shard=2, id=9, seq=3),
            row("end", shard=1, id=8, seq=2),
            row("head", conversation_id="c", seq=4),
            row("change", shard=1, id=7, seq=3, conversation_id="d", text="waybill.event.conversation"),
            row("receipts", shard=2, text="10,8"),
        ],
        5.0,
        3,
    )
    assert turn == Turn(
        at=5.0,
        incarnation="s-1",
        rows=5,
        more=True,
        ends={2: 9, 1: 8},
        heads={"c": 4},
        changes=[Change(Row(1, 7), "d", 3), Change(Row(2, 9), "c", 4)],
        receipts={2: [8, 10]},
    )
    assert not folded([row("end", shard=1, id=8, seq=2)], 5.0, 3).more


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30))), st.lists(st.integers(1, 30), min_size=1, unique=True))
def test_a_receipt_is_unseen_if_kafka_brought_none_before_its_judgement(
    steps: list[tuple[bool, int]], ids: list[int]
) -> None:
    """Each step is a record that comes, or a judgement up to an id."""
    records = ReceiptRecords()
    ids.sort()
    brought: set[int] = set()
    judged = 0
    for is_record, number in steps:
        if is_record:
            records.saw(3, number)
            brought.add(number)
        elif number > judged:
            asked = [id_ for id_ in ids if judged < id_ <= number]
            assert records.unseen(3, asked, number) == [id_ for id_ in asked if id_ not in brought]
            judged = number
    assert records.unseen(3, ids, 0) == [id_ for id_ in ids if id_ > judged and id_ not in brought]


def test_what_was_told_is_told_once_and_shards_are_apart() -> None:
    records = ReceiptRecords()
    records.tell(Row(3, 7))
    assert not records.told(4, 7)
    assert not records.told(3, 8)
    assert records.told(3, 7)
    assert not records.told(3, 7)
    records.saw(1, 5)
    assert records.unseen(2, [5], 5) == [5]
    records.clear()
    records.saw(2, 4)
    assert records.unseen(2, [4, 5], 5) == [5]


def test_records_are_forgotten_rather_than_kept_without_bound() -> None:
    records = ReceiptRecords(most=10)
    for id_ in range(1, 101):
        records.saw(3, id_)
        records.tell(Row(3, id_))
    assert records.unseen(3, range(1, 103), 102) == [101, 102]
    told = [id_ for id_ in range(1, 101) if records.told(3, id_)]
    assert 4 <= len(told) <= 10
    assert told[-1] == 100
    changes = ChangeRecords(most=2)
    for seq in (1, 2, 3):
        changes.saw("c", seq)
    asked = [Change(Row(1, seq), "c", seq) for seq in (1, 2, 3, 4)]
    assert [change.seq for change in changes.unseen(asked)] == [1, 4]
    assert [change.seq for change in changes.unseen(asked)] == [1, 2, 3, 4]


class FakeRoom:
    def __init__(self, head: int) -> None:
        self.top = head


class FakeFollower:
    def __init__(self, *feeds: str, device_id: str = "phone", number: int = 1) -> None:
        self.device_id = device_id
        self.number = number
        self.session = self
        self.feeds = dict.fromkeys(feeds)


class FakeFanout:
    def __init__(self, rooms: dict[str, int], **users: FakeFollower) -> None:
        self.rooms = {name: FakeRoom(head) for name, head in rooms.items()}
        self.users = {name: {follower} for name, follower in users.items()}
        self.told: list[tuple[Any, ...]] = []

    def heads(self, heads: Any) -> None:
        self.told.append(("heads", dict(heads)))
        for name, head in heads.items():
            self.rooms[name].top = max(self.rooms[name].top, head)

    def event(
        self, conversation_id: str, seq: int, type_: str, value: bytes, *, stamped: float, committed: float
    ) -> None:
        assert (stamped, committed) == (0.0, 7.0)
        self.told.append(("event", conversation_id, seq))
        if conversation_id in self.rooms:
            self.rooms[conversation_id].top = max(seq, self.rooms[conversation_id].top)

    def receipt(self, conversation_id: str, value: bytes) -> None:
        self.told.append(("receipt", conversation_id, value))


def content(row_: Row, conversation_id: str, seq: int | None = None, **body: Any) -> dict[str, Any]:
    payload = msgspec.json.encode({"sender_id": "ann", "body": body})
    return {
        "shard": row_.shard, "id": row_.id, "conversation_id": conversation_id, "seq": seq,
        "type": "waybill.event.member", "payload": payload, "committed": 7.0,
    }  # fmt: skip


class Outbox:
    """Rows to be read; the reading fails when told so."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = {Row(one["shard"], one["id"]): one for one in rows}
        self.read: list[Row] = []
        self.away = False

    async def contents(self, rows: Any) -> list[dict[str, Any]]:
        if self.away:
            raise UnavailableError("away")
        self.read += rows
        return [self.rows[row] for row in rows if row in self.rows]


def finds(kind: str) -> float:
    return SWEEP_FINDS.labels(kind)._value.get()


async def test_nothing_is_found_where_kafka_brought_all() -> None:
    fanout, outbox = FakeFanout({"c": 5}, ben=FakeFollower("c")), Outbox()
    judge = Judge(fanout, outbox.contents)
    judge.receipts.saw(1, 9)
    judge.changes.saw("c", 4)
    await judge.judge(
        Turn(0.0, ends={1: 9}, heads={"c": 5, "d": 8}, changes=[Change(Row(1, 8), "c", 4)], receipts={1: [9]})
    )
    assert fanout.told == outbox.read == []


async def test_what_kafka_did_not_bring_is_told() -> None:
    fanout = FakeFanout({"c": 5, "e": 9}, ben=FakeFollower())
    receipt, stranger, change, added, gone = Row(1, 9), Row(1, 7), Row(1, 8), Row(2, 3), Row(2, 4)
    outbox = Outbox(
        content(receipt, "c"), content(stranger, "x"), content(change, "c", 6, action="role", user_id="ben"),
        content(added, "d", 3, action="add", user_id="ben"),
    )  # fmt: skip
    judge = Judge(fanout, outbox.contents)
    before = [finds(kind) for kind in ("event", "change", "receipt")]
    turn = Turn(
        0.0,
        ends={1: 9, 2: 4},
        heads={"c": 8, "d": 3, "e": 9},
        changes=[Change(change, "c", 6), Change(added, "d", 3), Change(gone, "c", 2)],
        receipts={1: [7, 9]},
    )
    await judge.judge(turn)
    payload = outbox.rows[receipt]["payload"]
    assert fanout.told == [("event", "c", 6), ("event", "d", 3), ("heads", {"c": 8}), ("receipt", "c", payload)]
    assert [finds(kind) for kind in ("event", "change", "receipt")] == [before[0] + 1, before[1] + 2, before[2] + 1]
    assert judge.receipts.told(1, 9)
    assert not judge.receipts.told(1, 7)
    await judge.judge(turn)
    assert len(fanout.told) == 4


@pytest.mark.parametrize(
    ("feeds", "body", "found"),
    [
        ((), {"action": "add", "user_id": "ben"}, True),
        (("c",), {"action": "add", "user_id": "ben"}, False),
        ((), {"action": "create", "members": ["ann", "ben"]}, True),
        ((), {"action": "create", "members": ["ann", "cat"]}, False),
        ((), {"action": "remove", "user_id": "ben"}, False),
        ((), {"action": 7}, False),
    ],
)
async def test_a_change_below_the_head_is_found_if_somebody_here_was_brought_in(
    feeds: tuple[str, ...], body: dict[str, Any], found: bool
) -> None:
    """A later record, or a read, has raised the head over it: the sessions that follow know it, who was added not."""
    fanout = FakeFanout({"c": 9}, ben=FakeFollower(*feeds))
    outbox = Outbox(content(Row(1, 8), "c", 6, **body))
    await Judge(fanout, outbox.contents).judge(Turn(0.0, ends={1: 8}, changes=[Change(Row(1, 8), "c", 6)]))
    assert bool(fanout.told) is found


async def test_an_unreadable_payload_stops_nobody() -> None:
    fanout, broken, whole = FakeFanout({"c": 1, "d": 1}), Row(1, 1), Row(1, 2)
    outbox = Outbox({**content(broken, "c", 2), "payload": b"{"}, content(whole, "d", 2, action="leave"))
    changes = [Change(broken, "c", 2), Change(whole, "d", 2)]
    await Judge(fanout, outbox.contents).judge(Turn(0.0, ends={1: 2}, heads={"c": 2}, changes=changes))
    assert fanout.told == [("event", "d", 2), ("heads", {"c": 2})]


async def test_a_judgement_that_was_broken_off_goes_on() -> None:
    fanout = FakeFanout({"c": 1})
    outbox = Outbox(*(content(Row(1, id_), "c") for id_ in range(1, 500)))
    judge = Judge(fanout, outbox.contents)
    turn = Turn(0.0, ends={1: 499}, receipts={1: list(range(1, 500))})
    outbox.away = True
    with pytest.raises(UnavailableError):
        await judge.judge(turn)
    outbox.away = False
    judge.receipts.saw(1, 400)  # too late
    await judge.judge(turn)
    assert len(fanout.told) == len(outbox.read) == 499
