"""A batch that the store does not take as it is, with the store's word as a rule of the test."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.receipts.applying import Applier
from services.receipts.batch import Batch, Span, batches
from services.receipts.breaker import Breaker, BreakerTrippedError
from services.receipts.fold import Changes
from services.receipts.store import BadAckError, Counted
from shared.dead_letter import BadRecord
from shared.kafka import Consumed
from tests.unit.receipts.test_records import BASE, ID, Record


@dataclass
class PickyStore:
    """Takes no ack of the device `poison`."""

    applied: list[Span] = field(default_factory=list)
    desk: list[int] = field(default_factory=list)

    async def apply(
        self, _cluster: str, spans: Mapping[int, Span], changes: Changes, bad: Sequence[BadRecord]
    ) -> list[Counted]:
        if any(held.device_id == "poison" for held in changes.held):
            raise BadAckError("the store does not take it")
        self.applied += spans.values()
        self.desk += [one.offset for one in bad]
        return []


class Pit:
    """Of dead letters, without Kafka."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    async def bury(self, record: Consumed, _error: str) -> None:
        self.offsets.append(record.offset)


def of(*devices: str | None) -> Batch:
    """A batch of an ack per device; None is a record without a value."""
    records = [
        Record(None if device is None else json.dumps(BASE | {"device_id": device, "ranges": [[1, 1]]}).encode())
        for device in devices
    ]
    for offset, record in enumerate(records):
        record.offset = offset
    [batch] = batches({0: records}, {0: 0}, max_bytes=1 << 20)
    return batch


def applier(breaker: Breaker) -> tuple[Applier, PickyStore, Pit]:
    store, pit = PickyStore(), Pit()
    parts: tuple[Any, Any] = store, pit
    return Applier(*parts, breaker), store, pit


@pytest.mark.parametrize("devices", [("a", "poison", "b"), (None, "poison"), (None, None, "poison", None, "a")])
async def test_one_that_the_store_does_not_take_is_put_away_alone(devices: tuple[str | None, ...]) -> None:
    made, store, pit = applier(Breaker(share=0.9, least=100, window=1000))
    assert await made.apply(of(*devices), "c", lambda: True)
    bad = [offset for offset, device in enumerate(devices) if device in (None, "poison")]
    assert (store.desk, sorted(pit.offsets)) == (bad, bad)
    assert store.applied == [Span(offset, offset + 1) for offset in range(len(devices))], ID


@pytest.mark.promise("protocol.9.kafka")
async def test_a_store_that_takes_nothing_stops_it_before_all_acks_are_dead_letters() -> None:
    made, store, pit = applier(Breaker(share=0.5, least=10, window=1000))
    with pytest.raises(BreakerTrippedError, match="10 of the last 10"):
        await made.apply(of(*["poison"] * 300), "c", lambda: True)
    assert store.applied == [Span(offset, offset + 1) for offset in range(9)]
    assert pit.offsets == list(range(9))
