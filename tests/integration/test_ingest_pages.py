"""Pages of a timeline: limits, cursors, bytes; and what `position` says of the same timeline."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.databases import Database
from tests.ingest import Ingest, Json, new_id, running


@pytest_asyncio.fixture
async def ingest(database: Database) -> AsyncIterator[Ingest]:
    async with running(database) as found:
        yield found


def seqs(page: Json) -> list[int]:
    return [event["seq"] for event in page["events"]]


async def _with_messages(ingest: Ingest, count: int) -> str:
    group = await ingest.create("ann", "bob")
    await ingest.send_all(
        "ann", [{"conversation_id": group, "client_msg_id": new_id(), "body": {"n": n}} for n in range(count)]
    )
    return group


@pytest.mark.promise("protocol.6.page", "protocol.9.http")
async def test_pages_forward_and_backward(ingest: Ingest) -> None:
    group = await _with_messages(ingest, 9)
    page = await ingest.page("bob", group, after=0, limit=4)
    assert set(page) == {"conversation_id", "events", "next", "head", "complete"}
    assert page["conversation_id"] == group
    assert (seqs(page), page["next"], page["head"], page["complete"]) == ([1, 2, 3, 4], 4, 10, False)
    assert all("t" not in event for event in page["events"])
    page = await ingest.page("bob", group, after=6, limit=4)
    assert (seqs(page), page["next"], page["complete"]) == ([7, 8, 9, 10], 10, True)
    page = await ingest.page("bob", group, after=10)
    assert (seqs(page), page["next"], page["head"], page["complete"]) == ([], 10, 10, True)
    page = await ingest.page("bob", group, after=2**63 - 1)
    assert (seqs(page), page["next"], page["head"], page["complete"]) == ([], 10, 10, True)
    page = await ingest.page("bob", group, before=8, limit=3)
    assert (seqs(page), page["next"], page["head"], page["complete"]) == ([5, 6, 7], 5, 10, False)
    page = await ingest.page("bob", group, before=5, limit=4)
    assert (seqs(page), page["next"], page["complete"]) == ([1, 2, 3, 4], 1, True)
    page = await ingest.page("bob", group, before=1)
    assert (seqs(page), page["next"], page["complete"]) == ([], 1, True)
    page = await ingest.page("bob", group, before=2**63 - 1, limit=2)
    assert (seqs(page), page["next"], page["complete"]) == ([9, 10], 9, False)
    assert len((await ingest.page("shop", group, scope="service"))["events"]) == 10


@pytest.mark.promise("protocol.9.visible", "protocol.3.hidden_edit")
async def test_next_passes_over_what_is_not_visible(ingest: Ingest) -> None:
    group = await _with_messages(ingest, 2)
    await ingest.sent("bob", group, body={"text": "mine"})
    await ingest.sent("ann", group, type="member", body={"action": "remove", "user_id": "bob"})
    for _ in range(4):
        await ingest.sent("ann", group)
    await ingest.sent("ann", group, type="edit", target_seq=2, body={"text": "hidden from bob"})
    await ingest.sent("ann", group, type="member", body={"action": "add", "user_id": "bob"})
    await ingest.sent("ann", group, type="edit", target_seq=6, body={"text": "of a hidden one"})
    page = await ingest.page("bob", group, after=0, limit=5)
    assert (seqs(page), page["next"], page["head"], page["complete"]) == ([1, 2, 3, 4, 5], 10, 12, False)
    assert (page["events"][1]["body"], page["events"][1].get("edited_by")) == ({"n": 0}, None)
    page = await ingest.page("bob", group, after=6)
    assert (seqs(page), page["next"], page["complete"]) == ([11, 12], 12, True)
    assert (page["events"][1]["target_seq"], page["events"][1]["body"]) == (6, None)
    page = await ingest.page("bob", group, after=3, limit=3)
    assert (seqs(page), page["next"]) == ([4, 5, 11], 11)
    page = await ingest.page("bob", group, before=12, limit=2)
    assert (seqs(page), page["next"], page["complete"]) == ([5, 11], 5, False)


async def test_a_page_has_about_one_mebibyte_and_at_least_one_event(database: Database) -> None:
    async with running(database, ingest_max_body_bytes=500_000) as ingest:
        group = await ingest.create("ann")
        for size in (300_000, 300_000, 300_000, 300_000, 300_000):
            await ingest.sent("ann", group, body={"text": "x" * size})
        first = await ingest.page("ann", group)
        assert (seqs(first), first["next"], first["complete"]) == ([1, 2, 3, 4, 5], 5, False)
        last = await ingest.page("ann", group, before=7)
        assert (seqs(last), last["next"], last["complete"]) == ([3, 4, 5, 6], 3, False)
