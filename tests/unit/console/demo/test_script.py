from __future__ import annotations

import random
from collections import Counter

import pytest

from services.console.demo.script import (
    AWAY,
    DEVICES,
    KILLS,
    LEAVES,
    NAMES,
    PAIRS,
    RETURNS,
    Cast,
    burst,
    lines,
    members,
)

pytestmark = pytest.mark.promise("protocol.9.demo")


def test_there_are_six_users_twelve_devices_a_group_and_three_direct_chats() -> None:
    assert len(NAMES) * len(DEVICES) == 12
    assert list(members(0)) == list(NAMES)
    assert sorted(name for pair in PAIRS for name in pair) == sorted(NAMES)
    assert [len(members(chat)) for chat in (1, 2, 3)] == [2, 2, 2]


def test_one_device_is_away_for_half_of_it() -> None:
    assert RETURNS - LEAVES == 0.5


def test_every_service_on_the_way_is_killed_in_turn() -> None:
    assert {part for _, part in KILLS} == {"relay", "gateway", "ingest", "receipts"}
    shares = [share for share, _ in KILLS]
    assert shares == sorted(shares)
    assert shares[-1] <= 0.9


def test_lines_are_said_by_members_and_come_from_the_text_in_turn() -> None:
    said = list(lines(["one", "two", "three"], 1000, random.Random(7)))
    assert [line.text for line in said[:5]] == ["one", "two", "three", "one", "two"]
    assert all(line.name in members(line.chat) for line in said)
    chats = Counter(line.chat for line in said)
    assert set(chats) == {0, 1, 2, 3}
    assert 400 < chats[0] < 600
    assert len({(line.name, line.device) for line in said}) == 12


def test_the_device_that_is_away_says_nothing_meanwhile() -> None:
    said = list(lines(["x"], 1000, random.Random(7)))
    speaks = [at for at, line in enumerate(said) if (line.name, line.device) == AWAY]
    assert speaks
    assert not [at for at in speaks if LEAVES * 1000 <= at < RETURNS * 1000]


@pytest.mark.parametrize("count", [100, 300, 5000])
def test_after_the_last_kill_enough_is_left_to_see_the_recovery(count: int) -> None:
    left = count - round(KILLS[-1][0] * count)
    assert 2 <= burst(count) <= 60
    assert left > 2 * burst(count)


def test_a_second_run_has_other_users() -> None:
    assert Cast("a").user("ada") != Cast("b").user("ada")
