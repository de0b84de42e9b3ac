import json
import uuid

import pytest

from services.ingest.conversations import CreateRequest, plan, wire_ranges
from shared.contracts.words import direct_id
from shared.errors import BadRequestError
from shared.ranges import OPEN, RangeSet


@pytest.mark.promise("protocol.9.creation_event")
def test_a_group() -> None:
    made = plan(CreateRequest(kind="group", members=["bob", "ann", "bob"], title="Plans", history="all"), "ann")
    assert uuid.UUID(made.conversation_id).version == 4
    assert made.members == ("ann", "bob")
    assert (made.title, made.history, made.creator) == ("Plans", "all", "ann")
    assert json.loads(made.body) == {"action": "create", "kind": "group", "title": "Plans", "members": ["ann", "bob"]}


@pytest.mark.promise("protocol.3.create")
def test_a_direct_chat_has_one_id_and_no_title() -> None:
    one = plan(CreateRequest(kind="direct", members=["bob"], title="x"), "ann")
    other = plan(CreateRequest(kind="direct", members=["bob", "ann"]), "bob")
    assert one.conversation_id == other.conversation_id == direct_id("ann", "bob")
    assert one.title is None
    assert json.loads(one.body)["title"] is None


@pytest.mark.parametrize("version", [1, 2, 3, 5, 6, 8])
def test_only_versions_4_and_7_may_be_chosen(version: int) -> None:
    good = "0190a0b0-c0d0-7abc-8def-0123456789ab"
    assert plan(CreateRequest(kind="group", members=[], conversation_id=good.upper()), "ann").conversation_id == good
    with pytest.raises(BadRequestError):
        plan(CreateRequest(kind="group", members=[], conversation_id=good.replace("-7", f"-{version}")), "ann")
    with pytest.raises(BadRequestError):
        plan(CreateRequest(kind="group", members=[], conversation_id=good.replace("-8", "-c")), "ann")


@pytest.mark.promise("protocol.9.visible")
def test_wire_ranges() -> None:
    assert wire_ranges(RangeSet([(1, 3), (7, OPEN)])) == [(1, 3), (7, None)]
