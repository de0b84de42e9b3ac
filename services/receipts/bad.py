"""A record that nobody can read, as the desk of dead letters keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from shared.kafka import Consumed


class Bad(NamedTuple):
    """``headers``: a JSON array of pairs [name, text]; bytes that are not UTF-8 are replaced."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: str
    error: str

    @classmethod
    def of(cls, record: Consumed, error: str) -> Bad:
        """A record, and what is wrong with it."""
        headers = [(name, (value or b"").decode(errors="replace")) for name, value in record.headers]
        return cls(
            record.partition, record.offset, record.key, record.value, msgspec.json.encode(headers).decode(), error
        )
