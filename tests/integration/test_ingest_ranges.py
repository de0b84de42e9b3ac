"""The store's multiranges and `RangeSet` are the same sets."""

import random

import asyncpg
import pytest

from shared.postgres import from_multirange, to_multirange
from shared.ranges import OPEN, RangeSet, delivered_mark, held_up_to, visible_head
from tests.databases import Database

TOP = 30


def _some(chance: random.Random, *, low: int, open_ended: bool) -> RangeSet:
    pairs = []
    for _ in range(chance.randint(0, 4)):
        start = chance.randint(low, TOP)
        pairs.append((start, chance.randint(start, min(start + 6, TOP))))
    if open_ended and chance.random() < 0.5:
        pairs.append((chance.randint(low, TOP), OPEN))
    return RangeSet(pairs)


@pytest.mark.promise("protocol.5.delivered")
async def test_postgres_agrees(database: Database) -> None:
    chance = random.Random(20)
    rows = [
        (_some(chance, low=1, open_ended=False), _some(chance, low=1, open_ended=True), chance.randint(0, TOP + 3))
        for _ in range(2000)
    ]
    connection = await asyncpg.connect(database.owner_url)
    try:
        answers = await connection.fetch(
            """
            SELECT h, v, h + v AS both, h * v AS common, v - h AS less, visible_head(v, head) AS visible,
                   held_up_to(h, v, head) AS up_to, delivered_mark(h, v, head) AS mark
            FROM (
                SELECT held::int8multirange AS h, visible::int8multirange AS v, head, ord
                FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS i (held, visible, head, ord)
            ) AS i
            ORDER BY ord
            """,
            [to_multirange(held) for held, _, _ in rows],
            [to_multirange(visible) for _, visible, _ in rows],
            [head for _, _, head in rows],
        )
    finally:
        await connection.close()
    for (held, visible, head), answer in zip(rows, answers, strict=True):
        assert from_multirange(answer["h"]) == held
        assert from_multirange(answer["v"]) == visible
        assert from_multirange(answer["both"]) == held | visible
        assert from_multirange(answer["common"]) == held & visible
        assert from_multirange(answer["less"]) == visible - held
        assert answer["visible"] == visible_head(visible, head)
        assert answer["up_to"] == held_up_to(held, visible, head)
        assert answer["mark"] == delivered_mark(held, visible, head)
