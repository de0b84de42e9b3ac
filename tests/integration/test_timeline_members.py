"""Members who come, go and come back, beside others who do the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from services.ingest.writer import Written
from shared.postgres import from_multirange
from shared.ranges import OPEN
from tests.ingest import running
from tests.rows import user
from tests.timeline_stage import Stage, code, draft, member, open_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from services.ingest.writer import Answer
    from tests.databases import Database

CONFLICT = ("conflict", None)


@pytest.fixture
async def stage(module_database: Database) -> AsyncIterator[Stage]:
    async with open_stage(module_database, lanes=8) as found:
        yield found


async def visible(stage: Stage, group: str, who: str) -> list[tuple[int, int | None]]:
    value = await stage.owner.fetchval(
        "SELECT visible FROM member WHERE conversation_id = $1 AND user_id = $2", group, who
    )
    return [(low, None if high == OPEN else high) for low, high in from_multirange(value)]


async def admins(stage: Stage, group: str) -> list[str]:
    rows = await stage.owner.fetch(
        "SELECT user_id FROM member WHERE conversation_id = $1 AND role = 'admin' AND upper_inf(visible)"
        " ORDER BY user_id",
        group,
    )
    return [row["user_id"] for row in rows]


def written(answers: Sequence[Answer]) -> int:
    return sum(isinstance(one, Written) for one in answers)


@pytest.mark.promise("protocol.9.visible", "I12")
@pytest.mark.parametrize("history", ["joined", "all"])
async def test_what_a_member_sees_over_two_stays(stage: Stage, history: str) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, history=history)
    await stage.sent(ann, group)  # 2
    await stage.member(ann, group, "add", bob)  # 3
    await stage.sent(ann, group)
    await stage.member(ann, group, "remove", bob)  # 5
    await stage.sent(ann, group)
    await stage.member(ann, group, "add", bob)  # 7
    await stage.sent(ann, group)
    if history == "all":
        assert await visible(stage, group, bob) == [(1, None)], "who comes back sees what was missed, too"
    else:
        assert await visible(stage, group, bob) == [(3, 5), (7, None)]
    expected = [1, 2, 3, 4, 5, 6, 7, 8] if history == "all" else [3, 4, 5, 7, 8]
    assert list(await stage.page(bob, group)) == expected
    await stage.sent(bob, group, **member("leave"))  # 9
    await stage.sent(ann, group)
    assert list(await stage.page(bob, group)) == [*expected, 9], "one's own leaving is the last that one sees"


@pytest.mark.parametrize("history", ["joined", "all"])
async def test_the_removed_sees_the_removal_and_nothing_after(stage: Stage, history: str) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob, history=history)
    removal = await stage.member(ann, group, "remove", bob)
    await stage.sent(ann, group, type="edit", target_seq=await stage.sent(ann, group), body={})
    seen = await stage.page(bob, group)
    assert max(seen) == removal
    assert seen[removal]["body"] == {"action": "remove", "user_id": bob}
    assert await stage.said(bob, group) == ("not_member", "conversation_id")
    assert await stage.said(bob, group, **member("leave")) == ("not_member", "conversation_id")


async def test_who_comes_back_has_the_role_that_was_given_then(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    await stage.member(ann, group, "role", bob, role="admin")
    await stage.member(bob, group, "remove", ann)
    assert await admins(stage, group) == [bob]
    await stage.member(bob, group, "add", ann)
    assert await admins(stage, group) == [bob], "a role ends with the stay"
    await stage.member(bob, group, "remove", ann)
    await stage.member(bob, group, "add", ann, role="admin")
    assert await admins(stage, group) == sorted([ann, bob])


@pytest.mark.promise("protocol.3.roles")
async def test_of_those_who_add_one_at_the_same_time_one_does(stage: Stage) -> None:
    ann, bob, cid = user("ann"), user("bob"), user("cid")
    group = await stage.group(ann, bob)
    await stage.member(ann, group, "role", bob, role="admin")
    answers = await asyncio.gather(*(stage.send(by, group, **member("add", cid)) for by in (ann, bob) * 4))
    assert written(answers) == 1
    assert {code(one) for one in answers if not isinstance(one, Written)} == {("conflict", "body.user_id")}
    assert len(await visible(stage, group, cid)) == 1


async def test_adding_and_removing_at_the_same_time_ends_as_the_timeline_says(stage: Stage) -> None:
    ann, bob, cid = user("ann"), user("bob"), user("cid")
    group = await stage.group(ann, bob)
    await stage.member(ann, group, "role", bob, role="admin")
    changes = [(by, action) for by in (ann, bob) for action in ("add", "remove")] * 5
    await asyncio.gather(*(stage.send(by, group, **member(action, cid)) for by, action in changes))
    rows = await stage.owner.fetch(
        "SELECT seq, body ->> 'action' AS action FROM event WHERE conversation_id = $1 AND seq > 2 ORDER BY seq", group
    )
    actions = [row["action"] for row in rows]
    assert actions == ["add", "remove"] * (len(actions) // 2) + ["add"] * (len(actions) % 2)
    adds, removals = ([row["seq"] for row in rows if row["action"] == action] for action in ("add", "remove"))
    stays = [*zip(adds, removals, strict=False), *((seq, None) for seq in adds[len(removals) :])]
    merged: list[tuple[int, int | None]] = []
    for low, high in stays:
        if merged and merged[-1][1] == low - 1:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    assert await visible(stage, group, cid) == merged


async def test_a_request_that_adds_and_removes_does_both_in_order(database: Database) -> None:
    async with running(database) as ingest:
        group = await ingest.create("ann")
        events: list[Any] = [
            member("add", "bob"),
            {"body": {"text": "seen by bob"}},
            member("remove", "bob"),
            {"body": {"text": "not seen"}},
            member("add", "bob"),
        ]
        ids = [{"conversation_id": group, "client_msg_id": str(n)} for n in range(len(events))]
        results = await ingest.send_all("ann", [one | id_ for one, id_ in zip(events, ids, strict=True)])
        assert [one["event"]["seq"] for one in results] == [2, 3, 4, 5, 6]
        assert [event["seq"] for event in (await ingest.page("bob", group))["events"]] == [2, 3, 4, 6]


@pytest.mark.promise("protocol.3.roles")
@pytest.mark.parametrize("turn", range(3))
async def test_two_last_admins_who_leave_at_once_leave_one_behind(stage: Stage, turn: int) -> None:
    ann, bob, cid = user(f"ann{turn}"), user("bob"), user("cid")
    group = await stage.group(ann, bob, cid)
    await stage.member(ann, group, "role", bob, role="admin")
    answers = await asyncio.gather(*(stage.send(one, group, **member("leave")) for one in (ann, bob)))
    assert written(answers) == 1
    assert [code(one) for one in answers if not isinstance(one, Written)] == [CONFLICT]
    assert len(await admins(stage, group)) == 1


@pytest.mark.parametrize("how", ["leave", "role", "remove"])
async def test_an_admin_who_goes_beside_one_who_is_made_one_or_no_more(stage: Stage, how: str) -> None:
    """Whichever comes first: as long as there are others, one of them is an admin."""
    for _ in range(4):
        ann, bob, cid = user("ann"), user("bob"), user("cid")
        group = await stage.group(ann, bob, cid)
        await stage.member(ann, group, "role", bob, role="admin")
        goes: dict[str, Any] = {
            "leave": member("leave"),
            "role": member("role", ann, role="member"),
            "remove": member("remove", ann),
        }[how]
        answers = await asyncio.gather(
            stage.send(ann, group, **goes),
            stage.send(ann, group, **member("role", bob, role="member")),
            stage.send(bob, group, **member("leave")),
            stage.send(ann, group, **member("role", cid, role="admin")),
        )
        assert Counter(isinstance(one, Written) for one in answers)[True] >= 1
        assert await admins(stage, group), [code(one) for one in answers if not isinstance(one, Written)]


async def test_the_last_of_all_may_leave_and_an_ordinary_member_always_may(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    assert await stage.said(ann, group, **member("leave")) == CONFLICT
    assert await stage.said(ann, group, **member("remove", ann)) == CONFLICT
    assert await stage.said(ann, group, **member("role", ann, role="member")) == CONFLICT
    await stage.sent(bob, group, **member("leave"))
    await stage.sent(ann, group, **member("leave"))
    assert await admins(stage, group) == []
    assert await stage.said(ann, group) == ("not_member", "conversation_id")


async def test_nobody_joins_a_direct_chat(stage: Stage) -> None:
    ann, bob, cid = user("ann"), user("bob"), user("cid")
    chat = await stage.direct(ann, bob)
    for by, action, whom in ((ann, "add", cid), (bob, "remove", ann), (ann, "role", bob), (cid, "add", cid)):
        fields = {"role": "admin"} if action == "role" else {}
        expected = ("not_found", "conversation_id") if by == cid else CONFLICT
        assert await stage.said(by, chat, **member(action, whom, **fields)) == expected
    assert await stage.said(ann, chat, **member("leave")) == CONFLICT
    for one in (ann, bob):
        assert await visible(stage, chat, one) == [(1, None)]


@pytest.mark.promise("I12")
async def test_a_message_beside_its_senders_removal_is_before_it_or_refused(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    sends = [stage.send(bob, group) for _ in range(10)]
    answers = await asyncio.gather(*sends[:5], stage.send(ann, group, **member("remove", bob)), *sends[5:])
    removal = answers[5]
    assert isinstance(removal, Written)
    for one in (*answers[:5], *answers[6:]):
        if isinstance(one, Written):
            assert one.seq < removal.seq
        else:
            assert code(one) == ("not_member", "conversation_id")
    assert max(await stage.page(bob, group)) == removal.seq


async def test_an_edit_beside_a_recall_is_before_it_or_refused(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    for type_ in ("recall", "delete"):
        target = await stage.sent(ann, group)
        edits = [stage.send(ann, group, type="edit", target_seq=target, body={"n": n}) for n in range(8)]
        answers = await asyncio.gather(*edits[:4], stage.send(ann, group, type=type_, target_seq=target), *edits[4:])
        ended = answers[4]
        assert isinstance(ended, Written)
        for one in (*answers[:4], *answers[5:]):
            if isinstance(one, Written):
                assert one.seq < ended.seq
            else:
                assert code(one) == ("conflict", "target_seq")
        assert (await stage.page(ann, group))[target]["body"] is None


async def test_of_edits_at_once_the_later_seq_is_shown(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    await stage.sent(ann, group)
    drafts = [draft(ann, group, type="edit", target_seq=2, body={"n": n}) for n in range(12)]
    answers = await asyncio.gather(*(stage.write(one) for one in drafts))
    placed = {one.seq: n for n, (one,) in enumerate(answers) if isinstance(one, Written)}
    shown = (await stage.page(ann, group))[2]
    assert (shown["edited_by"], shown["body"]) == (14, {"n": placed[14]})
