import json
from collections import defaultdict

import msgspec
import pytest

from bench import receipts
from bench.acks import BUSY, WIDE, Mix, acks, by_partition, devices_of, ids
from bench.receipts_drain import given
from bench.receipts_ticks import Ticks
from bench.reference.plain_acks import _ACK, receipt
from services.receipts.fold import fold
from services.receipts.records import Delivered, parse
from shared.kafka import partition_of

SMALL = Mix("small", 20)


class Record(msgspec.Struct):
    """A record of the topic, as far as it is looked at."""

    partition: int
    key: bytes
    value: bytes


def test_the_acks_are_the_gateways_own_and_the_same_each_time() -> None:
    made = acks(SMALL, 500)
    assert made == acks(SMALL, 500)
    assert len(made.acks) == 500
    names = [str(id_) for id_ in ids(SMALL)]
    for ack in made.acks:
        parsed = parse(Record(*ack))  # type: ignore[arg-type]
        assert ack.partition == partition_of(parsed.conversation_id)
        seq = parsed.ranges[-1][1] if isinstance(parsed, Delivered) else parsed.seq
        assert 1 <= seq <= made.heads[names.index(parsed.conversation_id)]


def test_each_device_acks_a_sequence_without_holes() -> None:
    held: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    devices = {name for member in range(SMALL.members) for name in devices_of(member)}
    for ack in acks(SMALL, 2_000).acks:
        record = json.loads(ack.value)
        assert record["device_id"] in devices
        if record["kind"] == "delivered":
            key = (record["conversation_id"], record["user_id"], record["device_id"])
            ((low, high),) = record["ranges"]
            assert low == held[key] + 1
            held[key] = high
    assert len(held) == SMALL.devices


def test_one_mix_folds_and_the_other_does_not() -> None:
    def folded(mix: Mix) -> float:
        """Acks of a device, of those that a full batch of one partition holds."""
        some = next(iter(by_partition(acks(mix, 60_000).acks).values()))[:2_000]
        return len(some) / len(fold(parse(Record(*ack)) for ack in some).held)  # type: ignore[arg-type]

    assert folded(BUSY) > 3
    assert folded(WIDE) < 1.7


def test_the_reference_reads_the_same_acks() -> None:
    assert {_ACK.decode(ack.value).kind for ack in acks(SMALL, 100).acks} == {"delivered", "read"}
    ack = _ACK.decode(b'{"conversation_id":"c","user_id":"u","kind":"delivered","ranges":[[5,9],[1,3]]}')
    assert ack.mark == 9
    told = json.loads(receipt(ack, 9, 4))
    assert (told["t"], told["user_id"], told["delivered_seq"], told["read_seq"]) == ("receipt", "u", 9, 4)


def test_an_acks_time_ends_with_the_first_receipt_that_covers_it() -> None:
    ticks = Ticks()
    for seq, at in ((1, 1.0), (2, 2.0), (3, 3.0)):
        ticks.sent("c", "anna", seq, at)
    ticks.measured_from = 2.0
    ticks.heard("c", "anna", 0, 3.5)
    ticks.heard("c", "ben", 9, 3.5)
    assert not ticks.latencies
    ticks.heard("c", "anna", 2, 4.0)
    assert ticks.latencies == [2.0]
    assert not ticks.none_waits
    ticks.heard("c", "anna", 3, 3.25)
    assert ticks.latencies == [2.0, 0.25]
    assert ticks.none_waits


def test_the_figures_of_the_parts_come_together() -> None:
    found = receipts.compared({
        "busy": {"waybill": [{"rate_s": 40e3}], "peer": [{"rate_s": 4e3}], "peer_parallel": [{"rate_s": 5e3}]},
        "wide": {"waybill": [{"rate_s": 16_000.0}], "peer": [{"rate_s": 8_000.0}]},
        "ticks": {"waybill": [{"p50_ms": 20.0, "p99_ms": 30.0}], "peer": [{"p50_ms": 10.0, "p99_ms": 30.0}]},
    })  # fmt: skip
    assert found["waybill"] == {"rate_s": 40_000.0, "rate_s_wide": 16_000.0, "p50_ms": 20.0, "p99_ms": 30.0}
    assert found["ratio"] == {"rate_s": 10.0, "rate_s_wide": 2.0, "p50_ms": 0.5, "p99_ms": 1.0}
    assert found["ratio_parallel"] == {"rate_s": 8.0}


def test_alone_there_is_no_ratio() -> None:
    assert receipts.compared({"busy": {"waybill": [{"rate_s": 1.0}]}}) == {"waybill": {"rate_s": 1.0}}


def test_only_the_services_own_settings_come_from_outside() -> None:
    environment = {"WAYBILL_RECEIPTS_BATCH_RECORDS": "5", "WAYBILL_POSTGRES_URL": "x", "HOME": "y"}
    assert given(environment) == {"WAYBILL_RECEIPTS_BATCH_RECORDS": "5"}


@pytest.mark.parametrize("mix", [BUSY, WIDE])
def test_the_mixes_are_what_their_words_say(mix: Mix) -> None:
    assert mix.devices == mix.conversations * 6
