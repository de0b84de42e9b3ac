import msgspec
import pytest

from bench.reference.seed_outbox import Message, _template
from shared.statements import statements


@pytest.mark.parametrize("text", ["plain", "100 %", "%d and %s", "%%", "{}", "“quoted” 👍"])
def test_a_payload_holds_the_number_and_the_body_as_it_was(text: str) -> None:
    message = Message("chat", "ada", "id-1", msgspec.Raw(msgspec.json.encode({"text": text})))
    payload = msgspec.json.decode(_template(message, "%d") % 42)
    assert payload == {
        "seq": 42,
        "conversation_id": "chat",
        "sender_id": "ada",
        "client_msg_id": "id-1",
        "body": {"text": text},
    }


def test_every_statement_of_the_reference_is_there() -> None:
    found = statements("bench/reference/seed_outbox.py")
    assert {"schema", "claim", "mark_sent", "mark_failed", "release_stale", "write_at_once"} <= found.keys()
    assert "SKIP LOCKED" in found["claim"]
    assert "im_outbox_due ON im_outbox (status, " in found["schema"]
