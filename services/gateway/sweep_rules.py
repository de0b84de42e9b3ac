"""What a sweep makes of the rows of the outbox, and what it remembers of records that Kafka brought. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARDS = 64


class Folded(Protocol):
    """A row of the statement `sweep`: `kind` says what it is, and which of the others are set."""

    def __getitem__(self, name: str, /) -> Any: ...


class Row(NamedTuple):
    """A row of the outbox."""

    shard: int
    id: int


class Change(NamedTuple):
    """An event that changes a membership or a conversation, and the row that it is in."""

    row: Row
    conversation_id: str
    seq: int


@dataclass(slots=True)
class Turn:
    """What was read in one turn. ``at``: when, in seconds. ``ends``: of each shard the last id. ``rows``: how many.

    ``heads``: the highest seq by conversation. ``receipts``: ids by shard. ``more``: a shard has more. ``unseen``: what
    of the receipts Kafka did not bring, once that was judged; ``changes`` are then only such ones, too.
    """

    at: float
    incarnation: str | None = None
    rows: int = 0
    more: bool = False
    ends: dict[int, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    receipts: dict[int, list[int]] = field(default_factory=dict)
    unseen: list[Row] | None = None


def folded(rows: Iterable[Folded], at: float, most: int) -> Turn:
    """A turn from the rows of the statement `sweep`; ``most``: rows that it was to read of a shard."""
    turn = Turn(at)
    for row in rows:
        match row["kind"]:
            case "store":
                turn.incarnation = row["text"]
            case "end":
                turn.ends[row["shard"]] = row["id"]
                turn.rows += row["seq"]
                turn.more = turn.more or row["seq"] == most
            case "head":
                turn.heads[row["conversation_id"]] = row["seq"]
            case "change":
                turn.changes.append(Change(Row(row["shard"], row["id"]), row["conversation_id"], row["seq"]))
            case "receipts":
                turn.receipts[row["shard"]] = sorted(map(int, row["text"].split(",")))
    turn.changes.sort()
    return turn


class ReceiptRecords:
    """Which receipts came from Kafka, and which the sweep told of; by shard, and by the ids of their rows.

    At most about ``most`` of a shard are remembered: a receipt that was forgotten is told twice, which is harmless.
    """

    def __init__(self, most: int = 50_000) -> None:
        self._most = most
        self._seen: defaultdict[int, set[int]] = defaultdict(set)
        self._judged: defaultdict[int, int] = defaultdict(int)
        self._told: defaultdict[int, set[int]] = defaultdict(set)

    def clear(self) -> None:
        """Ids begin anew."""
        for kept in (self._seen, self._judged, self._told):
            kept.clear()

    def saw(self, shard: int, id_: int) -> None:
        """Kafka brought it."""
        if id_ > self._judged[shard]:
            seen = self._seen[shard]
            seen.add(id_)
            if len(seen) > self._most:
                # The lower half counts as seen: as long as the sweep cannot read, nobody tells twice.
                self._forget(shard, sorted(seen)[len(seen) // 2])

    def unseen(self, shard: int, ids: Iterable[int], end: int) -> list[int]:
        """What of these Kafka did not bring. ``ids`` are all of the shard up to ``end``; each is asked for once."""
        judged, seen = self._judged[shard], self._seen[shard]
        found = [id_ for id_ in ids if id_ > judged and id_ not in seen]
        self._forget(shard, end)
        return found

    def _forget(self, shard: int, end: int) -> None:
        self._judged[shard] = max(self._judged[shard], end)
        self._seen[shard] = {id_ for id_ in self._seen[shard] if id_ > end}

    def tell(self, row: Row) -> None:
        """The sweep tells of it."""
        told = self._told[row.shard]
        told.add(row.id)
        if len(told) > self._most:
            self._told[row.shard] = set(sorted(told)[len(told) // 2 :])

    def told(self, shard: int, id_: int) -> bool:
        """Whether the sweep told of it; asked once."""
        told = self._told.get(shard)
        if told is None or id_ not in told:
            return False
        told.remove(id_)
        return True


class ChangeRecords:
    """Which changes came from Kafka: the newest ``most`` of those that no sweep has met yet."""

    def __init__(self, most: int = 50_000) -> None:
        self._most = most
        self._seen: dict[tuple[str, int], None] = {}

    def clear(self) -> None:
        """Seqs may be used again."""
        self._seen.clear()

    def saw(self, conversation_id: str, seq: int) -> None:
        """Kafka brought it."""
        self._seen[conversation_id, seq] = None
        if len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]

    def unseen(self, changes: Iterable[Change]) -> list[Change]:
        """What of these Kafka did not bring; each is asked for once."""
        found = []
        for change in changes:
            key = change.conversation_id, change.seq
            if key in self._seen:
                del self._seen[key]
            else:
                found.append(change)
        return found
