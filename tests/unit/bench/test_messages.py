import itertools

import msgspec
import pytest

from bench.messages import LINES, Chat, Messages, pairs
from shared.contracts.words import is_name


@pytest.mark.parametrize(("users", "chats"), [(2, 1), (5, 10), (20, 50), (60, 200), (60, 1770)])
def test_pairs_differ_and_are_of_two_users(users: int, chats: int) -> None:
    found = pairs(users, chats, "run")
    assert len({frozenset(pair) for pair in found}) == chats
    assert all(len(set(pair)) == 2 for pair in found)
    assert all(is_name(user) for pair in found for user in pair)


def test_more_pairs_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 users have 3 pairs"):
        pairs(3, 4, "run")


def test_messages_go_round_the_chats_with_ids_of_their_own() -> None:
    chats = [Chat(f"chat-{number}", (f"a{number}", f"b{number}")) for number in range(3)]
    supply = Messages(chats)
    made = list(itertools.islice(iter(supply.next, None), 300))
    assert len({message.client_msg_id for message in made}) == 300
    assert [message.conversation_id for message in made[:4]] == ["chat-0", "chat-1", "chat-2", "chat-0"]
    for message in made:
        chat = chats[int(message.conversation_id[-1])]
        assert message.sender_id in chat.users
        assert msgspec.json.decode(message.body)["text"] in LINES
    assert len({message.sender_id for message in made}) == 6
