"""A store in memory that answers the gateway's queries, so that a test can choose what happens in between.

`Store` stands for the pool. Each answer is of one moment: ``before`` and ``after`` name what is done just before a
query sees the store, and when it has seen it but its answer is still on its way. Each is done once.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncpg

from services.gateway import catchup, group_receipts, listing, revocations
from shared.postgres import to_multirange
from shared.ranges import OPEN, RangeSet, held_up_to, visible_head
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MODULES = (catchup, group_receipts, listing, revocations)
_NAMES = {text: name for module in _MODULES for name, text in statements(str(module.__file__)).items()}


class Row(dict[Any, Any]):
    """As asyncpg's: by name, and in order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


@dataclass
class Timeline:
    """A conversation. Seq n is ``events[n - 1]``: its type, and what its frame says besides."""

    name: str
    history: str = "joined"
    kind: str = "group"
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    visible: dict[str, RangeSet] = field(default_factory=dict)
    records: dict[tuple[str, str], RangeSet] = field(default_factory=dict)
    marks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    settings: dict[str, tuple[str | None, bool]] = field(default_factory=dict)
    """By user until when it is muted, '' for ever, and whether it is archived."""
    store: Store | None = None
    changed_xid: int = 0

    @property
    def head(self) -> int:
        return len(self.events)

    def write(self, type_: str = "message", **more: Any) -> int:
        """Append an event; returns its seq."""
        self.events.append((type_, {"sender_id": "bob", "body": {"n": self.head + 1}, **more}))
        if self.store is not None:
            self.store.xid += 1
            self.changed_xid = self.store.xid
        return self.head

    def add(self, user_id: str) -> int:
        seq = self.write("member", body={"action": "add", "user_id": user_id, "role": "member"})
        opened = RangeSet([(1 if self.history == "all" else seq, OPEN)])
        self.visible[user_id] = self.visible.get(user_id, RangeSet()) | opened
        return seq

    def remove(self, user_id: str) -> int:
        seq = self.write("member", body={"action": "remove", "user_id": user_id})
        self.visible[user_id] = self.visible[user_id].up_to(seq)
        return seq

    def event_id(self, seq: int) -> str:
        return f"{seq:08x}-0000-7000-8000-000000000000"

    def value(self, seq: int) -> bytes:
        """As it is in Kafka."""
        type_, said = self.events[seq - 1]
        return self._frame(seq, type_, said)

    def present(self, seq: int, visible: RangeSet) -> bytes:
        """As a read for somebody who may see this finds it now."""
        type_, said = self.events[seq - 1]
        target = said.get("target_seq")
        later = [(kind, more) for kind, more in self.events[seq:] if more.get("target_seq") == seq]
        if any(kind in ("recall", "delete") for kind, _ in later) or (target and target not in visible):
            said = {**said, "body": None}
        elif later:
            said = {**said, "body": later[-1][1]["body"]}
        return self._frame(seq, type_, said)

    def _frame(self, seq: int, type_: str, said: dict[str, Any]) -> bytes:
        head = {"t": "event", "conversation_id": self.name, "seq": seq, "event_id": self.event_id(seq), "type": type_}
        return json.dumps({**head, **said}, separators=(",", ":")).encode()


class Store:
    """Conversations by id; ``incarnation``: which life of the store this is."""

    def __init__(self) -> None:
        self.of: dict[str, Timeline] = {}
        self.incarnation: str | None = "0197c3d1-0000-4000-8000-000000000001"
        self.before: dict[str, deque[Callable[[], object]]] = defaultdict(deque)
        self.after: dict[str, deque[Callable[[], object]]] = defaultdict(deque)
        self.asked: list[str] = []
        self.fails: dict[str, deque[Exception]] = defaultdict(deque)
        self.lasts: dict[str, deque[asyncio.Event]] = defaultdict(deque)
        """The next queries of this name do not end before their event is set."""
        self.xid = 700
        self.revocations: list[Row] = []

    def make(self, name: str, *members: str, history: str = "joined", kind: str = "group", head: int = 1) -> Timeline:
        """A conversation with its creation and, up to ``head``, messages."""
        made = self.of[name] = Timeline(name, history, kind, store=self)
        made.write("conversation", body={"action": "create", "kind": kind, "members": list(members)})
        for user_id in members:
            made.visible[user_id] = RangeSet([(1, OPEN)])
        while made.head < head:
            made.write()
        return made

    # As a pool.

    async def fetch(self, query: str, *arguments: Any, timeout: float | None = None) -> list[Row]:
        name = _NAMES[query]
        self.asked.append(name)
        if self.fails[name]:
            raise self.fails[name].popleft()
        if self.before[name]:
            self.before[name].popleft()()
        rows = getattr(self, "_" + name)(*arguments)
        if self.lasts[name]:
            await self.lasts[name].popleft().wait()
        await asyncio.sleep(0)
        if self.after[name]:
            self.after[name].popleft()()
        return list(rows)

    async def fetchval(self, query: str, *arguments: Any) -> Any:
        return (await self.fetch(query, *arguments))[0]["incarnation"]

    def _snapshot(self) -> dict[str, str | None]:
        return {"incarnation": self.incarnation, "xmin": str(self.xid + 1)}

    def _incarnation(self) -> list[Row]:
        return [Row(incarnation=self.incarnation)]

    def _conversations_of_users(self, users: list[str]) -> list[Row]:
        found = {user_id: [name for name, of in self.of.items() if user_id in of.visible] for user_id in users}
        return [Row(user_id=user_id, ids=",".join(names)) for user_id, names in found.items() if names]

    def _changed_since(self, users: list[str], since: str) -> list[Row]:
        rows = []
        for user_id, after in zip(users, since[1:-1].split(","), strict=True):
            names = [name for name, of in self.of.items() if user_id in of.visible]
            changed = "".join(
                "1" if after == "NULL" or self.of[name].changed_xid >= int(after) else "0" for name in names
            )
            heads = ",".join(str(self.of[name].head) for name in names)
            told = (",".join(names), heads, changed) if names else (None, None, None)
            rows.append(Row(**self._snapshot(), ids=told[0], heads=told[1], changed=told[2]))
        return rows

    def _list_conversations(
        self, users: list[str], devices: list[str], names: str, seqs: str, event_ids: str
    ) -> list[Row]:
        asked = zip(users, devices, *(text[1:-1].split(",") for text in (names, seqs, event_ids)), strict=True)
        return [self._listed(*one, first=number == 0) for number, one in enumerate(asked)]

    def _listed(self, user_id: str, device_id: str, name: str, seq: str, event_id: str, *, first: bool) -> Row:
        of = self.of.get(name)
        visible = None if of is None else of.visible.get(user_id)
        head = visible_head(visible, of.head) if of is not None and visible is not None else 0
        row = Row(**self._snapshot()) if first else Row(incarnation=None, xmin=None)
        if of is None or visible is None:
            return Row({**row, **dict.fromkeys(range(20))})
        held = of.records.get((user_id, device_id))
        record = (visible.lowest or 1) - 1 if held is None else held_up_to(held, visible, of.head)
        peers = [one for one in of.visible if one != user_id] if of.kind == "direct" else []
        peer = next(((one, *of.marks[one]) for one in peers if one in of.marks), (None,) * 4)
        mismatch = event_id != "NULL" and int(seq) > 0 and (int(seq) > of.head or event_id != of.event_id(int(seq)))
        told = (
            *(of.kind, "t", of.history == "all", of.head, "member", to_multirange(visible), head, record),
            *(of.marks.get(user_id) or (None, None, None)),
            *(max(0, head - record), *of.settings.get(user_id, (None, False))),
            *("2026-01-01T00:00:00.000000Z", mismatch, *peer),
        )
        return Row({**row, **dict(enumerate(told))})

    def _events_of(self, name: str, position: int, most: int, _: int) -> list[Row]:
        of = self.of.get(name)
        if of is None:
            return []
        seqs = range(position + 1, min(of.head, position + most) + 1)
        everything = RangeSet([(1, OPEN)])
        types = {seq: of.events[seq - 1][0] for seq in seqs}
        rows = [Row(last_seq=of.head, seq=seq, type=types[seq], frame=of.present(seq, everything)) for seq in seqs]
        return rows or [Row(last_seq=of.head, seq=None, type=None, frame=None)]

    def _events_after(self, name: str, user_id: str, position: int, most: int, _: int) -> list[Row]:
        of = self.of.get(name)
        if of is None or user_id not in of.visible:
            return []
        visible = of.visible[user_id]
        ranges = [asyncpg.Range(low, None if high == OPEN else high + 1) for low, high in visible]
        common = {"last_seq": of.head, "role": "member", "visible": ranges}
        seqs = [seq for seq in visible.up_to(of.head).seqs() if seq > position][:most]
        rows = [Row(**common, seq=seq, frame=of.present(seq, visible)) for seq in seqs]
        return rows or [Row(**common, seq=None, frame=None)]

    def _marks_so_far(self, name: str, users: list[str], most: int) -> list[Row]:
        of = self.of[name]
        members = [(one, None, None, None) for one in users if one in of.visible and of.visible[one].highest == OPEN]
        marks = [(one, *marks) for one, marks in sorted(of.marks.items())]
        return [Row(enumerate(mark)) for mark in [*members, *marks[:most]]]

    def _of_user(self, user_id: str) -> list[Row]:
        return [row for row in self.revocations if row["user_id"] == user_id]

    def _events_at(self, user_id: str, names: list[str], seqs: list[int]) -> list[Row]:
        return [
            Row(conversation_id=name, seq=seq, frame=self.of[name].present(seq, self.of[name].visible[user_id]))
            for name, seq in sorted(zip(names, seqs, strict=True))
            if seq in self.of[name].visible[user_id]
        ]
