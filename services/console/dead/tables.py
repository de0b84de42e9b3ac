"""Dead letters as people read them in a terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from services.console.terminal import table

if TYPE_CHECKING:
    from rich.table import Table

    from services.console.dead.schemas import Change, Detail, Page, Reading

_ORDER = {"in_order": "in order", "late": "late", "any_order": "in any order", None: ""}


def listing(page: Page) -> list[Table | str]:
    """A page of letters."""
    rows = [
        (
            letter.dead_id,
            letter.state,
            _second(letter.died_at),
            letter.topic if letter.read_from is None else _reading(letter.read_from),
            letter.conversation_id or (letter.key or "")[:36],
            letter.seq,
            letter.attempts,
            _ORDER[letter.retry],
            letter.error,
        )
        for letter in page.letters
    ]
    if not rows:
        return ["No dead letters."]
    columns = ("letter", "state", "died", "topic", "conversation or key", "seq", "tries", "a retry comes", "error")
    more = [f"There are more: --after {page.next}"] if page.next else []
    return [table(columns, rows), *more]


def detail(letter: Detail) -> list[Table | str]:
    """A letter with all that is known of it."""
    facts = [
        ("state", letter.state),
        ("error", letter.error),
        ("a retry comes", _ORDER[letter.retry] or None),
        (
            "in Kafka",
            letter.place and f"{letter.place.topic}, partition {letter.place.partition}, offset {letter.place.offset}",
        ),
        ("read from", letter.read_from and f"{_reading(letter.read_from)}, of the cluster {letter.read_from.cluster}"),
        ("key", letter.key if letter.key_encoding != "base64" else f"base64 {letter.key}"),
        ("topic", letter.topic),
        ("type", letter.type or None),
        ("source", letter.source or None),
        ("conversation", letter.conversation_id),
        ("seq", letter.seq),
        ("event", letter.event_id),
        ("origin", letter.origin),
        ("shard and id", f"{letter.shard}, {letter.outbox_id}" if letter.outbox_id is not None else letter.shard),
        ("written" if letter.read_from is None else "read", letter.created_at),
        ("died", letter.died_at),
        ("redriven", letter.redriven_at),
        ("settled", letter.settled_at),
        ("headers", "\n".join(f"{name}: {_value(value)}" for name, value in letter.headers) or None),
        (f"payload, {_size(letter)}", payload(letter)),
    ]
    parts: list[Table | str] = [
        table(("", f"letter {letter.dead_id}"), [(name, value) for name, value in facts if value is not None])
    ]
    if letter.tries:
        done, who = ("taken by Kafka", "relay") if letter.read_from is None else ("applied", "service")
        rows = [(t.attempt, _second(t.at), t.error or done, t.owner, t.epoch) for t in letter.tries]
        parts.append(table(("try", "at", "outcome", who, "epoch"), rows))
    if letter.actions:
        rows_of_actions = [(_second(a.at), a.action, a.who, a.reason) for a in letter.actions]
        parts.append(table(("at", "action", "who", "reason"), rows_of_actions))
    return parts


def payload(letter: Detail, *, most: int = 2000) -> str:
    """The payload as text, cut after so many characters: `--json` has all of it."""
    text = bytes(letter.payload).decode()
    if letter.payload_encoding == "base64":
        text = f"base64 {json.loads(text)}"
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters; --json has all)"


def outcome(change: Change) -> str:
    """What became of a letter, in a line."""
    if change.error is not None:
        return change.error.message
    if change.last_error is not None:
        return f"letter {change.dead_id} is dead again: {change.last_error}"
    told = {"retrying": "is being tried again", "sent": "is sent", "discarded": "is discarded"}
    text = told.get(change.state or "", f"is {change.state}")
    return f"letter {change.dead_id} {text}" + ("" if change.changed else " (it was before; nothing is changed)")


def _reading(place: Reading) -> str:
    return f"{place.topic}, partition {place.partition}, offset {place.offset}"


def _size(letter: Detail) -> str:
    cut = letter.payload_cut_from
    return f"{letter.payload_bytes} bytes" + ("" if cut is None else f" of {cut}")


def _second(at: str) -> str:
    return at[:19].replace("T", " ")


def _value(value: str | None) -> str:
    return "(none)" if value is None else value
