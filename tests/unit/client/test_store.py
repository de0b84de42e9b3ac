from __future__ import annotations

from typing import Any

import pytest
from waybill_client import MemoryStore, Outgoing, Saved, Sent
from waybill_client._frames import read_event

from .frames_of_server import CHAT, ME, event


def an(seq: int, **more: Any) -> Any:
    return read_event(event(seq, **more))


async def test_a_delete_erases_the_body_and_its_edits() -> None:
    store = MemoryStore()
    edit = an(2, type="edit", target_seq=1, body={"text": "new"})
    await store.save([an(1), edit], [], {})
    held = await store.events(CHAT, 0, 10)
    assert (held[0].body, held[0].edited_by) == ({"text": "new"}, 2)
    await store.save([an(3, type="delete", target_seq=1, body=None)], [], {})
    assert [one.body for one in await store.events(CHAT, 0, 10)] == [None, None, None]


async def test_an_edit_below_what_is_held_changes_nothing() -> None:
    store = MemoryStore()
    await store.save([an(1, body={"text": "newest"}, edited_by=9)], [], {})
    await store.save([an(2, type="edit", target_seq=1, body={"text": "old"})], [], {})
    await store.save([an(3, type="recall", target_seq=1, body=None)], [], {})
    assert (await store.events(CHAT, 0, 1))[0].body == {"text": "newest"}


@pytest.mark.parametrize("event_first", [True, False])
async def test_an_own_message_is_done_when_its_event_is_held(*, event_first: bool) -> None:
    store = MemoryStore()
    message = Outgoing(CHAT, "m", "message", b"{}")
    await store.queue(message)
    own = an(1, sender=ME, client_msg_id="m")
    saved = Saved(CHAT, last_pulled_seq=1)
    answer = Sent(CHAT, "m", "e1", 1, "", duplicate=False)
    if event_first:
        await store.save([own], [saved], {})
        await store.settle(message.key, answer, None)
    else:
        await store.settle(message.key, answer, None)
        assert [one.state for one in store.outgoing()] == ["sent"]
        await store.save([own], [saved], {})
    assert store.outgoing() == []


async def test_a_rewind_turns_own_messages_back_to_sending() -> None:
    store = MemoryStore()
    for name in "ab":
        await store.queue(Outgoing(CHAT, name, "message", b"{}"))
    await store.settle(("send", CHAT, "a"), Sent(CHAT, "a", "e2", 2, "", duplicate=False), None)
    await store.settle(("send", CHAT, "b"), Sent(CHAT, "b", "e3", 3, "", duplicate=False), None)
    saved = Saved(CHAT, last_pulled_seq=2, acked_seq=2, event_id="e2")
    await store.save([an(1), an(2, sender=ME, client_msg_id="a")], [saved], {CHAT: 2})
    again = await store.rewind(CHAT, 1, ME)
    assert [one.client_msg_id for one in again] == ["a", "b"]
    (state,), sending = await store.load()
    assert state == Saved(CHAT, 1, 1, 1, 0, 0, "e1")
    assert sending == again
    assert await store.event_id(CHAT, 2) is None


async def test_a_delete_after_a_rewind_erases_nothing_of_what_has_the_seq_of_a_lost_edit() -> None:
    store = MemoryStore()
    await store.save([an(1), an(2, type="edit", target_seq=1, body={"text": "lost"})], [], {})
    await store.rewind(CHAT, 1, ME)
    await store.save([an(2, event_id="other"), an(3, type="delete", target_seq=1, body=None)], [], {})
    assert [one.body is None for one in await store.events(CHAT, 0, 10)] == [True, False, True]


async def test_edits_that_were_let_go_are_remembered_no_more() -> None:
    store = MemoryStore(max_events=2)
    edits = [an(seq, type="edit", target_seq=1, body={"text": str(seq)}) for seq in range(2, 9)]
    await store.save([an(1), *edits], [], {})
    assert store._held[CHAT].edits == {1: [7, 8]}
    await store.save([an(9, type="delete", target_seq=1, body=None)], [], {})
    assert [one.body for one in await store.events(CHAT, 0, 10)] == [None, None]


async def test_a_sent_whose_seq_holds_another_event_is_not_done() -> None:
    store = MemoryStore()
    message = Outgoing(CHAT, "m", "message", b"{}")
    await store.queue(message)
    await store.save([an(1), an(2)], [Saved(CHAT, last_pulled_seq=2)], {})
    await store.settle(message.key, Sent(CHAT, "m", "other", 1, "", duplicate=False), None)
    assert [one.state for one in store.outgoing()] == ["sent"]
    assert (await store.load())[1] == store.outgoing()
    # Below the seq that is rewound to as well: nobody saw its event.
    assert [one.client_msg_id for one in await store.rewind(CHAT, 2, ME)] == ["m"]
    assert [one.state for one in store.outgoing()] == ["sending"]


async def test_memory_is_bounded() -> None:
    store = MemoryStore(max_events=3)
    await store.save([an(seq) for seq in range(1, 9)], [], {})
    assert [one.seq for one in await store.events(CHAT, 0, 10)] == [6, 7, 8]
