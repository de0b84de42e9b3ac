"""Who may read what an event has said before it was edited, and what is left of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.ingest.history import History, history
from services.ingest.schemas import History as Documented
from shared.errors import ForbiddenError, NotFoundError, NotMemberError
from tests.ingest import new_id, running
from tests.rows import user
from tests.timeline_stage import Stage, member, open_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.databases import Database


@pytest.fixture
async def stage(module_database: Database) -> AsyncIterator[Stage]:
    async with open_stage(module_database) as found:
        yield found


def texts(told: History) -> list[tuple[int, Any]]:
    return [(one.seq, json.loads(bytes(one.body))) for one in told.versions]


async def edited(stage: Stage, sender: str, group: str, count: int = 2) -> int:
    """A message with so many edits; its seq. Each text is its number."""
    seq = await stage.sent(sender, group, body={"n": 0})
    for number in range(1, count + 1):
        await stage.sent(sender, group, type="edit", target_seq=seq, body={"n": number})
    return seq


@pytest.mark.promise("protocol.6.history")
async def test_versions_come_with_the_oldest_first_in_pages(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann, bob)
    seq = await edited(stage, bob, group, 5)
    await edited(stage, bob, group)
    told = await history(stage.ingest, "admins", group, ann, seq=seq)
    assert texts(told) == [(2 + n, {"n": n}) for n in range(6)]
    assert (told.next, told.complete, told.conversation_id, told.seq) == (7, True, group, 2)
    assert {one.sender_id for one in told.versions} == {bob}
    assert told.versions[1].event_id == str(await stage.event_id(group, 3))
    after, pages = 0, []
    while True:
        told = await history(stage.ingest, "admins", group, ann, seq=seq, after=after, limit=2)
        pages.append([one.seq for one in told.versions])
        after = told.next
        if told.complete:
            break
    assert pages == [[2, 3], [4, 5], [6, 7]]
    told = await history(stage.ingest, "admins", group, ann, seq=seq, after=7)
    assert (told.versions, told.next, told.complete) == ([], 7, True)


@pytest.mark.promise("protocol.6.history")
async def test_who_may(stage: Stage) -> None:
    ann, bob, eve = user("ann"), user("bob"), user("eve")
    group = await stage.group(ann, bob)
    seq = await edited(stage, ann, group)
    allowed = [("admins", ann), ("members", ann), ("members", bob), ("admins", None), ("members", None), ("off", None)]
    for who, reader in allowed:
        assert len((await history(stage.ingest, who, group, reader, seq=seq)).versions) == 3  # type: ignore[arg-type]
    for who, reader in (("admins", bob), ("off", ann), ("off", bob)):
        with pytest.raises(ForbiddenError):
            await history(stage.ingest, who, group, reader, seq=seq)  # type: ignore[arg-type]
    for where in (group, new_id()):
        with pytest.raises(NotFoundError) as stranger:
            await history(stage.ingest, "off", where, eve, seq=seq)
        assert stranger.value.field == "conversation_id"
    await stage.sent(ann, group, **member("role", bob, role="admin"))
    await stage.sent(ann, group, **member("leave"))
    with pytest.raises(NotMemberError):
        await history(stage.ingest, "admins", group, ann, seq=seq)
    assert (await history(stage.ingest, "admins", group, bob, seq=seq)).complete
    chat = await stage.direct(ann, bob)
    seq = await edited(stage, ann, chat)
    with pytest.raises(ForbiddenError):
        await history(stage.ingest, "admins", chat, ann, seq=seq)


async def test_what_was_not_visible_is_not_shown(stage: Stage) -> None:
    ann, bob = user("ann"), user("bob")
    group = await stage.group(ann)
    hidden = await edited(stage, ann, group)
    await stage.sent(ann, group, **member("add", bob))
    seq = await edited(stage, ann, group, 1)
    await stage.sent(ann, group, **member("remove", bob))
    await stage.sent(ann, group, type="edit", target_seq=seq, body={"n": "behind his back"})
    told = await history(stage.ingest, "members", group, bob, seq=seq)
    assert texts(told) == [(6, {"n": 0}), (7, {"n": 1})], "a former member sees what he saw"
    for unseen in (hidden, 10**6):
        with pytest.raises(NotFoundError) as refused:
            await history(stage.ingest, "members", group, bob, seq=unseen)
        assert refused.value.field == "seq"
    for no_message in (1, seq + 1, seq + 2):
        with pytest.raises(NotFoundError):
            await history(stage.ingest, "admins", group, ann, seq=no_message)


@pytest.mark.parametrize("type_", ["recall", "delete"])
async def test_what_is_recalled_or_deleted_has_no_texts(stage: Stage, type_: str) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    seq = await edited(stage, ann, group)
    await stage.sent(ann, group, type=type_, target_seq=seq)
    for reader in (ann, None):
        told = await history(stage.ingest, "admins", group, reader, seq=seq)
        assert texts(told) == [(2, None), (3, None), (4, None)]
        assert not any(one.expired for one in told.versions)


async def test_a_text_that_was_erased_by_age_says_so(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    seq = await edited(stage, ann, group)
    await stage.owner.execute("UPDATE event SET body = NULL WHERE conversation_id = $1 AND seq = 2", group)
    told = await history(stage.ingest, "admins", group, ann, seq=seq)
    assert [one.expired for one in told.versions] == [True, False, False]


async def test_a_page_has_about_one_mebibyte(stage: Stage) -> None:
    ann = user("ann")
    group = await stage.group(ann)
    large = {"text": "x" * 60_000}
    seq = await stage.sent(ann, group, body=large)
    for _ in range(19):
        await stage.sent(ann, group, type="edit", target_seq=seq, body=large)
    told = await history(stage.ingest, "admins", group, ann, seq=seq)
    assert (len(told.versions), told.complete) == (18, False)
    told = await history(stage.ingest, "admins", group, ann, seq=seq, after=told.next)
    assert (len(told.versions), told.complete) == (2, True)


async def test_over_http(database: Database) -> None:
    async with running(database, ingest_edit_history="members") as ingest:
        group = await ingest.create("ann", "bob")
        await ingest.sent("ann", group)
        await ingest.sent("ann", group, type="edit", target_seq=2, body={"text": "new"})
        path = f"/v1/conversations/{group.upper()}/events/2/history"
        answer = await ingest.call("GET", path, "bob", params={"limit": 1})
        assert answer.status == 200
        Documented.model_validate(answer.json)
        assert answer.json["versions"][0]["body"] == {"text": "hello"}
        assert "expired" not in answer.json["versions"][0]
        assert (answer.json["next"], answer.json["complete"]) == (2, False)
        assert (await ingest.call("GET", path, "gw", scope="gateway")).status == 403
        for wrong, field in (("2/history?limit=0", "limit"), ("0/history", "seq"), ("2/history?after=x", "after")):
            answer = await ingest.call("GET", f"/v1/conversations/{group}/events/{wrong}", "bob")
            assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "bad_request", field)
