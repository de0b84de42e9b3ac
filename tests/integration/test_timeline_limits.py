"""Until when, and up to how many: windows of edits and recalls, the size of a group; and what is noted of refusals."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from services.ingest.conversations import CreateRequest
from services.ingest.moderation import Moderated, Verdict
from services.ingest.writer import Rules, Writer, Written
from shared.errors import ConflictError, ModeratedError
from tests.ingest import new_id, running
from tests.rows import user
from tests.timeline_stage import TRACE, TRACEPARENT, Stage, code, draft, member, open_stage, seqs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from services.ingest.admission import Send
    from tests.databases import Database

HOUR = Rules(edit_window_s=3600.0, recall_window_s=3600.0)
LATE = ("forbidden", "target_seq")


@pytest.fixture
async def stage(module_database: Database) -> AsyncIterator[Stage]:
    async with open_stage(module_database) as found:
        yield found


@pytest.mark.promise("protocol.9.windows")
@pytest.mark.parametrize("type_", ["edit", "recall", "delete"])
async def test_what_is_too_late_for_the_sender(stage: Stage, type_: str) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    change: dict[str, Any] = {"type": type_, "target_seq": 2, **({"body": {}} if type_ == "edit" else {})}
    await stage.sent(bob, group)
    await stage.age(group, "1 hour")
    assert await stage.said(bob, group, rules=HOUR, **change) == LATE
    assert (await stage.page(bob, group))[2]["body"] == {"text": "hello"}
    other = "recall" if type_ == "edit" else "edit"
    await stage.sent(bob, group)
    assert await stage.sent(bob, group, rules=HOUR, **change | {"target_seq": 3})
    only_other = Rules(**{f"{other}_window_s": 3600.0})
    assert await stage.sent(bob, group, rules=only_other, **change), "each window is for its own"


@pytest.mark.parametrize("type_", ["recall", "delete"])
async def test_admins_are_bound_by_no_window(stage: Stage, type_: str) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    for sender in (bob, ann):
        await stage.sent(sender, group)
    await stage.age(group, "1 year")
    for seq in (2, 3):
        await stage.sent(ann, group, rules=HOUR, type=type_, target_seq=seq)
    await stage.sent(ann, group)
    await stage.age(group, "1 year")
    assert await stage.said(ann, group, rules=HOUR, type="edit", target_seq=6, body={}) == LATE


async def test_nothing_is_too_late_unless_it_is_set(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    chat = await stage.direct(ann, bob)
    await stage.sent(ann, chat)
    await stage.sent(ann, chat)
    await stage.age(chat, "10 years")
    await stage.sent(ann, chat, type="edit", target_seq=2, body={})
    await stage.sent(ann, chat, type="recall", target_seq=2)
    assert await stage.said(ann, chat, rules=HOUR, type="delete", target_seq=3) == LATE


async def test_a_repeat_is_answered_however_late_it_comes(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await stage.sent(ann, group)
    recall = draft(ann, group, type="edit", target_seq=2, body={})
    assert seqs(await stage.write(recall, rules=HOUR)) == [3]
    await stage.age(group, "1 day")
    (again,) = await stage.write(recall, rules=HOUR)
    assert isinstance(again, Written)
    assert (again.seq, again.duplicate) == (3, True)


async def test_the_process_takes_its_limits_from_its_settings(database: Database) -> None:
    settings = {"ingest_edit_window_s": 0, "ingest_recall_window_s": 0, "ingest_group_size": 3}
    async with running(database, **settings) as ingest:
        group = await ingest.create("ann", "bob", "cid")
        await ingest.sent("bob", group)
        for change in ({"type": "edit", "body": {}}, {"type": "recall"}):
            refused = await ingest.send("bob", group, target_seq=2, **change)
            assert (refused["status"], refused["error"]["code"], refused["error"]["field"]) == (403, *LATE)
        full = await ingest.send("ann", group, **member("add", "dan"))
        assert (full["status"], full["error"]["field"]) == (409, "body.user_id")
        answer = await ingest.call(
            "POST", "/v1/conversations", "ann", json={"kind": "group", "members": ["bob", "cid", "dan"]}
        )
        assert (answer.status, answer.json["code"], answer.json["field"]) == (409, "conflict", "members")
        sent = {"conversation_id": group, "sender_id": "bob", "device_id": "phone", "body": {}}
        await ingest.send_all("gw", [{**sent, "client_msg_id": "one"}], scope="gateway")
        await ingest.send_all("shop", [{**sent, "client_msg_id": "two"}], scope="service")
    owner = await asyncpg.connect(database.owner_url)
    devices = await owner.fetch("SELECT device_id FROM outbox WHERE seq > 2 ORDER BY id")
    await owner.close()
    assert [row[0] for row in devices] == ["phone", None], "a device is the gateway's to tell"


@pytest.mark.promise("protocol.9.windows")
async def test_a_group_is_full_for_whoever_comes_at_the_same_time(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann, user("bob"))
    rules = Rules(group_size=7)
    added = [member("add", user("x")) for _ in range(20)]
    answers = await asyncio.gather(*(stage.send(ann, group, rules=rules, **one) for one in added))
    assert Counter(isinstance(one, Written) for one in answers) == {True: 5, False: 15}
    assert {code(one) for one in answers if not isinstance(one, Written)} == {("conflict", "body.user_id")}
    present = "SELECT count(*) FROM member WHERE conversation_id = $1 AND upper_inf(visible)"
    counted = "SELECT members FROM conversation WHERE conversation_id = $1"
    assert await stage.owner.fetchval(present, group) == await stage.owner.fetchval(counted, group) == 7


async def test_the_count_follows_whoever_comes_and_goes(stage: Stage) -> None:
    ann, bob, cid = user("ann"), user("bob"), user("cid")
    group = await stage.group(ann, bob)
    rules = Rules(group_size=3)
    counted = "SELECT members FROM conversation WHERE conversation_id = $1"
    assert await stage.owner.fetchval(counted, group) is None, "nobody has been added yet"
    await stage.sent(bob, group, **member("leave"))
    await stage.sent(ann, group, rules=rules, **member("add", cid))
    assert await stage.owner.fetchval(counted, group) == 2
    await stage.sent(ann, group, rules=rules, **member("add", bob))
    assert await stage.said(ann, group, rules=rules, **member("add", user("dan"))) == ("conflict", "body.user_id")
    await stage.sent(ann, group, **member("role", bob, role="admin"))
    await stage.owner.execute("UPDATE member SET muted = true WHERE conversation_id = $1", group)
    assert await stage.owner.fetchval(counted, group) == 3
    await stage.sent(ann, group, **member("remove", cid))
    await stage.sent(ann, group, rules=rules, **member("add", user("dan")))
    assert await stage.said(ann, group, rules=rules, **member("add", cid)) == ("conflict", "body.user_id")
    assert await stage.owner.fetchval(counted, group) == 3


async def test_a_writer_of_before_moves_the_count_too(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await stage.sent(ann, group, **member("add", user("bob")))
    send = draft(ann, group, **member("add", user("cid"))).draft
    one = [[group], [ann], [new_id()], ["member"], [b""], ['{"action":"add"}'], [None], [False], ["add"]]
    row = await stage.ingest.fetchrow(
        "SELECT * FROM write_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
        *one,
        [send.subject],
        *([[None]] * 2),
        [False],
        [None],
        True,
    )
    assert row is not None
    assert tuple(row)[:2] == ("new", 3)
    assert await stage.owner.fetchval("SELECT members FROM conversation WHERE conversation_id = $1", group) == 3


async def test_a_group_is_not_made_larger_than_it_may_be(stage: Stage) -> None:
    ann = user("ann")
    request = CreateRequest(kind="group", members=[ann, "b", "c"], conversation_id=new_id().lower())
    with pytest.raises(ConflictError) as refused:
        await stage.create(request, size=2)
    assert refused.value.field == "members"
    made = await stage.create(request, size=3)
    assert await stage.create(request, size=2) == made, "one that is there is answered as such"
    noted = [(row["cause"], row["user_id"]) for row in await stage.transitions(made, "sent")]
    assert noted == [("refused:conflict_group_full", ann), ("duplicate", ann)]


async def test_what_moderation_refuses_is_noted_and_told_with_its_reason(stage: Stage) -> None:
    class Judge:
        async def verdicts(self, sends: Sequence[Send]) -> list[Verdict]:
            """All but those that say so are allowed; who wrote them is removed meanwhile, if they say that."""
            texts = [json.loads(send.draft.body.text)["text"] for send in sends if send.draft.body]
            if "late" in texts:
                await stage.sent(ann, group, **member("remove", bob))
            return [Verdict(text == "fine", None if text == "fine" else f"it is {text}") for text in texts]

    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    moderated = Moderated(Writer(stage.ingest, 5.0), Judge(), "closed")
    first = draft(bob, group, body={"text": "fine"})
    said = [draft(bob, group, body={"text": text}) for text in ("bad", "fine")]
    answers = await moderated.write([first, *said])
    assert seqs(answers) == [2, 3]
    assert isinstance(answers[1], ModeratedError)
    assert answers[1].message == "it is bad"
    (late,) = await moderated.write([draft(bob, group, body={"text": "late"})])
    assert code(late) == ("not_member", "conversation_id"), "the better reason goes before"
    noted = [(row["cause"], row["user_id"]) for row in await stage.transitions(group, "sent")]
    assert noted == [("refused:moderated", bob), ("refused:not_member", bob)]


async def test_what_is_refused_or_repeated_is_noted_with_its_cause(stage: Stage) -> None:
    ann, bob, eve = user("ann"), user("bob"), user("eve")
    group = await stage.group(ann, bob)
    told = {"scope": "gateway", "device_id": "phone", "traceparent": TRACEPARENT}
    first = draft(ann, group, client_msg_id="one", **told)
    await stage.write(first)
    assert await stage.transitions(group, "sent") == [], "what is accepted is told by the outbox"
    await stage.write(
        first,
        draft(ann, group, client_msg_id="one", body={"text": "other"}, **told),
        draft(eve, group, client_msg_id="two", **told),
        draft(ann, group, client_msg_id="three", **told),
        draft(ann, group, client_msg_id="three", **told),
    )
    await stage.said(bob, group, client_msg_id="four", type="recall", target_seq=2)
    rows = await stage.transitions(group, "sent")
    noted = [
        (row["cause"], row["user_id"], row["device_id"], row["from_seq"], json.loads(row["detail"])["client_msg_id"])
        for row in rows
    ]
    assert noted == [
        ("duplicate", ann, "phone", 2, "one"),
        ("refused:client_msg_id_reused", ann, "phone", 2, "one"),
        ("refused:not_found", eve, "phone", None, "two"),
        ("duplicate", ann, "phone", 3, "three"),
        ("refused:forbidden_not_yours", bob, None, None, "four"),
    ]
    assert [row["trace_id"] for row in rows] == [TRACE] * 4 + [None]
    assert json.loads(rows[-1]["detail"])["type"] == "recall"
    assert {row["service"] for row in rows} == {"ingest"}
