"""Notices: events that services write, with their own idempotency."""

from collections.abc import AsyncIterator

import pytest

from tests.databases import Database
from tests.ingest import Ingest, running
from tests.rows import user


@pytest.fixture
async def ingest(module_database: Database) -> AsyncIterator[Ingest]:
    async with running(module_database) as made:
        yield made


@pytest.mark.promise("I2", "I9")
async def test_a_repeat_is_one_notice_and_two_services_may_use_one_id(ingest: Ingest) -> None:
    ann = user("ann")
    group = await ingest.create(ann)

    async def notice(service: str, text: str = "your order has left", **more: object) -> tuple[int, object]:
        fields = {"type": "system", "client_msg_id": "order-7", "body": {"text": text}, **more}
        result = await ingest.send(service, group, scope="service", **fields)
        return result["status"], result.get("event", {}).get("seq") or result["error"]["code"]

    assert await notice("shop") == (201, 2)
    assert await notice("shop") == (200, 2)
    assert await notice("bank") == (201, 3)
    assert await notice("shop") == (200, 2)
    assert await notice("bank") == (200, 3)
    assert await notice("shop", "another text") == (409, "client_msg_id_reused")
    assert await notice("shop", type="message", sender_id="shop") == (409, "client_msg_id_reused")
    page = await ingest.page(ann, group)
    assert [(event["seq"], event["type"], event["sender_id"]) for event in page["events"]] == [
        (1, "conversation", ann), (2, "system", "shop"), (3, "system", "bank"),
    ]  # fmt: skip


@pytest.mark.promise("I2")
async def test_a_notice_in_a_users_name_shares_that_users_ids(ingest: Ingest) -> None:
    ann = user("ann")
    group = await ingest.create(ann)
    fields = {"client_msg_id": "one", "body": {"text": "hello"}}
    assert (await ingest.send(ann, group, **fields))["status"] == 201
    named = {**fields, "type": "system", "sender_id": ann}
    assert (await ingest.send("shop", group, scope="service", **named))["status"] == 409
    other = {**named, "client_msg_id": "two"}
    assert (await ingest.send("shop", group, scope="service", **other))["status"] == 201
    assert (await ingest.send("bank", group, scope="service", **other))["status"] == 200


@pytest.mark.promise("protocol.9.unread")
async def test_a_notice_counts_as_unread_until_it_is_recalled(ingest: Ingest) -> None:
    ann = user("ann")
    group = await ingest.create(ann)
    event = await ingest.sent("shop", group, scope="service", type="system", body={"text": "x"})
    assert (await ingest.call("GET", "/v1/unread", ann)).json["unread"] == 1
    await ingest.sent(ann, group, type="recall", target_seq=event["seq"])
    assert (await ingest.call("GET", "/v1/unread", ann)).json["unread"] == 0
