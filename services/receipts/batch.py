"""What was fetched, cut into batches that are applied whole: pure bookkeeping of offsets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shared.kafka import Consumed


Fetched = dict[int, "list[Consumed]"]
"""Records by partition, in the order of offsets."""


class PositionLostError(Exception):
    """The records are not those that follow the stored offsets: they have to be read again from there."""


@dataclass(frozen=True, slots=True)
class Span:
    """A batch covers the offsets [since, upto) of its partition, whether or not there is a record at each."""

    since: int
    upto: int


@dataclass(slots=True)
class Batch:
    """Records in the order of each partition, and by partition the span that they cover."""

    spans: dict[int, Span] = field(default_factory=dict)
    records: list[Consumed] = field(default_factory=list)
    size: int = 0
    """Bytes of the records' values."""


def batches(
    fetched: Mapping[int, Sequence[Consumed]], expected: Mapping[int, int], *, max_bytes: int
) -> Iterator[Batch]:
    """Cut records, by partition, into batches of about ``max_bytes`` of values; each has one record at least.

    ``expected`` is the next offset of each partition. Offsets may have gaps (transactions, compaction), never steps
    back. Raises `PositionLostError`.
    """
    batch = Batch()
    for partition, records in fetched.items():
        since = begun = expected.get(partition)
        for record in records:
            if since is None or begun is None or record.offset < since:
                raise PositionLostError(f"partition {partition}: expected {since}, got {record.offset}")
            batch.records.append(record)
            batch.size += len(record.value or b"") or 1
            since = record.offset + 1
            if batch.size >= max_bytes:
                batch.spans[partition] = Span(begun, since)
                yield batch
                batch, begun = Batch(), since
        if since is not None and begun is not None and since > begun:
            batch.spans[partition] = Span(begun, since)
    if batch.records:
        yield batch


def start(stored: int | None, begin: int, end: int) -> int:
    """Where to read a partition from, whose offsets are [begin, end): its beginning if nothing usable is stored."""
    return begin if stored is None or not begin <= stored <= end else stored
