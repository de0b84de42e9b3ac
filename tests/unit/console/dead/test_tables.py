from __future__ import annotations

import json
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from services.console.dead import tables
from services.console.dead.letters import pairs, readable, text_or_base64
from services.console.dead.schemas import Action, Change, Detail, Letter, Page, Place, Reading, Refusal, Try, only
from services.console.terminal import plain, table
from shared.errors import ConflictError, NotFoundError

LETTER = Letter(
    dead_id=17,
    state="dead",
    origin="outbox",
    shard=27,
    outbox_id=204,
    conversation_id="1f0d3c1e-0000-4000-8000-000000000001",
    seq=7,
    event_id="1f0d3c1e-0000-4000-8000-000000000002",
    topic="events.v1",
    type="waybill.event.message",
    payload_bytes=9,
    attempts=2,
    error="too large: 1200000 of 1000000 bytes",
    created_at="2026-01-02T03:04:05.678901Z",
    died_at="2026-01-02T03:05:05.678901Z",
    settled_at=None,
    retry="in_order",
    place=None,
)


def detail(payload: bytes = b'{"seq":7}', **changed: object) -> Detail:
    encoding, raw = readable(payload)
    fields = {
        **msgspec.structs.asdict(LETTER),
        "source": "/waybill/ingest",
        "headers": [],
        "payload_encoding": encoding,
        "payload": raw,
        "redriven_at": None,
        "tries": [],
        "actions": [],
        **changed,
    }
    return Detail(**fields)


def drawn(parts: list[object]) -> str:
    out = StringIO()
    console = Console(file=out, width=200)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_a_page_is_drawn_with_all_that_is_needed_to_act() -> None:
    text = drawn(tables.listing(Page([LETTER], "2026-01-02T03:05:05.678901Z_17")))
    for word in ("17", "dead", "2026-01-02 03:05:05", "events.v1", LETTER.conversation_id, "in order", LETTER.error):
        assert word in text
    assert "--after 2026-01-02T03:05:05.678901Z_17" in text
    assert tables.listing(Page([], None)) == ["No dead letters."]
    assert len(tables.listing(Page([LETTER], None))) == 1


def test_a_letter_is_drawn_with_tries_actions_and_place() -> None:
    found = detail(
        state="sent",
        place=Place("events.v1", 27, 41),
        headers=[("traceparent", "00-ab"), ("alone", None)],
        tries=[
            Try(1, "2026-01-02T03:04:06.000000Z", "too large", "relay-1", 5),
            Try(2, LETTER.died_at, None, "relay-1", 6),
        ],
        actions=[Action(LETTER.died_at, "retry", "ada", None)],
    )
    text = drawn(tables.detail(found))
    for word in (
        "partition 27, offset 41",
        "traceparent: 00-ab",
        "alone: (none)",
        '{"seq":7}',
        "relay-1",
        "taken by Kafka",
        "ada",
    ):
        assert word in text
    assert "settled" not in text


def test_a_consumers_letter_is_drawn_with_where_it_was_read() -> None:
    read = {
        "origin": "acks.v1",
        "topic": "acks.v1",
        "read_from": Reading("acks.v1", 27, 41, "cluster-1"),
        "conversation_id": None,
        "event_id": None,
        "outbox_id": None,
        "type": "",
        "retry": "any_order",
        "key": "/w==",
        "key_encoding": "base64",
        "payload_cut_from": 200_000,
        "source": "",
        "tries": [Try(1, LETTER.died_at, "value: x", "receipts", None), Try(2, LETTER.died_at, None, "receipts", None)],
    }
    found = detail(**read)
    text = drawn(tables.detail(found))
    for word in ("partition 27, offset 41, of the cluster cluster-1", "base64 /w==", "9 bytes of 200000", "applied"):
        assert word in text
    for word in ("None", "relay", "source", "type", "conversation"):
        assert word not in text
    (listed, *_) = tables.listing(Page([found], None))
    assert "acks.v1, partition 27, offset 41" in drawn([listed])


def test_a_key_is_told_as_text_where_it_is_one() -> None:
    assert [text_or_base64(key) for key in (None, b"", b"a", b"\xff")] == [
        (None, None),
        ("text", ""),
        ("text", "a"),
        ("base64", "/w=="),
    ]


def test_a_record_does_not_command_the_terminal() -> None:
    found = detail(b'{"a":"[red]x[/red]"}', headers=[("a", "\x1b[2J\x07")], error="[bold]x[/bold]\r\x9b1m")
    text = drawn(tables.detail(found))
    assert not set(text) & set("\x1b\x07\r\x9b")
    for word in ("[red]x[/red]", "\\x1b[2J\\x07", "[bold]x[/bold]\\r\\x9b1m"):
        assert word in text


@pytest.mark.parametrize(
    ("text", "shown"), [("añ 字\nb", "añ 字\nb"), ("\x00\t", "\\x00\\t"), ("\u202eabc", "\\u202eabc")]
)
def test_control_characters_are_made_visible(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_long_payload_is_cut_and_says_so() -> None:
    text = tables.payload(detail(json.dumps({"text": "x" * 5000}).encode()))
    assert text.endswith("(5012 characters; --json has all)")
    assert len(text) < 2100
    assert tables.payload(detail(b"\xff")) == "base64 /w=="


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (Change(1, "retrying", changed=True), "letter 1 is being tried again"),
        (Change(1, "retrying", changed=False), "letter 1 is being tried again (it was before; nothing is changed)"),
        (Change(1, "sent", changed=True), "letter 1 is sent"),
        (Change(1, "discarded", changed=True), "letter 1 is discarded"),
        (Change(1, "dead", changed=True, last_error="too large"), "letter 1 is dead again: too large"),
        (Change(1, None, changed=False, error=Refusal("not_found", "letter 1: none")), "letter 1: none"),
        (Change(1, "rewound", changed=True), "letter 1 is rewound"),
    ],
)
def test_what_became_of_a_letter_in_a_line(change: Change, line: str) -> None:
    assert tables.outcome(change) == line
    assert change.failed == (change.error is not None or change.last_error is not None)


def test_a_single_refusal_is_raised_as_what_it_is() -> None:
    done = Change(1, "retrying", changed=True)
    assert only([done]) is done
    for code, kind in (("not_found", NotFoundError), ("conflict", ConflictError)):
        with pytest.raises(kind, match="why"):
            only([Change(1, None, changed=False, error=Refusal(code, "why"))])


def test_an_odd_list_of_headers_loses_nothing() -> None:
    assert pairs([]) == []
    assert pairs(["a", "1", "b"]) == [("a", "1"), ("b", None)]


def test_an_empty_cell_is_empty() -> None:
    assert "None" not in drawn([table(["a", "b"], [(None, 0)])])
