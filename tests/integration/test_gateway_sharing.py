"""Who shares a conversation with whom, as the gateway reads it, in a store of some size."""

import json
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from services.gateway import presence
from services.gateway.presence import Sharing
from shared.errors import UnavailableError
from shared.postgres import open_pool, to_array
from shared.statements import statements
from tests.databases import Database, Databases, fill, run

USERS = 10_000
FILL = f"""
    CREATE FUNCTION conversation_of(n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE RETURN lpad(to_hex(n), 32, '0')::uuid;
    -- Groups of five, one with everybody in it, and one user who is in a thousand that all others have left.
    INSERT INTO member (conversation_id, user_id, role, visible)
    SELECT conversation_of(n), 'u' || (n + k * 1009) % {USERS}, 'member', '{{[1,)}}'
    FROM generate_series(0, {USERS}) AS n, generate_series(0, 4) AS k;
    INSERT INTO member SELECT conversation_of(1000000), 'g' || n, 'member', '{{[1,)}}'
    FROM generate_series(1, 20000) AS n;
    INSERT INTO member SELECT conversation_of(2000000 + n), 'busy', 'member', '{{[1,)}}'
    FROM generate_series(0, 999) AS n;
    INSERT INTO member SELECT conversation_of(2000000 + n), 'u' || n, 'member', '{{[1,5)}}'
    FROM generate_series(0, 999) AS n;
    INSERT INTO member VALUES (conversation_of(2000007), 'came-back', 'member', '{{[1,5),[9,)}}');
    VACUUM ANALYZE member;
"""


@pytest.fixture(scope="module")
def filled(databases: Databases) -> Iterator[Database]:
    made = databases.create()
    run(fill(made, FILL))
    yield made
    databases.drop(made)


@pytest.fixture
async def sharing(filled: Database) -> AsyncIterator[Sharing]:
    async with open_pool(filled.url("gateway"), size=1, name="tests") as pool:
        yield Sharing(pool)


async def test_only_who_are_both_members_now(sharing: Sharing) -> None:
    pairs = {
        ("u1", f"u{1 + 1009}"): True,
        (f"u{1 + 1009}", "u1"): True,
        ("u1", "u2"): False,
        ("busy", "u7"): False,
        ("u7", "busy"): False,
        ("busy", "came-back"): True,
        ("came-back", "busy"): True,
        ("came-back", "u7"): False,
        ("u1", "nobody"): False,
        ("nobody", "u1"): False,
        ("g1", "g20000"): True,
    }
    assert await sharing(list(pairs)) == {pair for pair, shared in pairs.items() if shared}
    assert await sharing([]) == set()


@pytest.mark.parametrize(
    ("askers", "others", "pages"),
    [
        (["busy"] * 200, [f"u{n}" for n in range(200)], 200 * 5 + 100),
        ([f"u{n}" for n in range(200)], ["busy"] * 200, 200 * 30),
        (["g1"] * 200, [f"g{n}" for n in range(1, 201)], 200 * 5),
        ([f"u{n}" for n in range(200)], [f"u{n + 1}" for n in range(200)], 200 * 30),
    ],
    ids=["one with many conversations", "many of one", "a large group", "many"],
)
async def test_it_touches_only_what_is_asked_for(
    filled: Database, askers: list[str], others: list[str], pages: int
) -> None:
    each = {asker: [other for one, other in zip(askers, others, strict=True) if one == asker] for asker in askers}
    low, high, users = [], [], []
    for wanted in each.values():
        low.append(len(users) + 1)
        users += wanted
        high.append(len(users))
    arguments = (f"{{{','.join(each)}}}", to_array(low), to_array(high), f"{{{','.join(users)}}}")
    connection = await asyncpg.connect(filled.url("gateway"))
    try:
        await connection.execute(f"PREPARE shares AS {statements(presence.__file__)['shares_conversation']}")
        call = "EXECUTE shares(" + ", ".join(f"'{one}'" for one in arguments) + ")"
        [explained] = json.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}"))
    finally:
        await connection.close()
    assert explained["Plan"]["Shared Hit Blocks"] + explained["Plan"]["Shared Read Blocks"] < pages


async def test_a_store_that_is_away_is_unavailable() -> None:
    async with open_pool("postgres://nobody@127.0.0.1:1/none", size=1, name="tests") as pool:
        with pytest.raises(UnavailableError):
            await Sharing(pool)([("ann", "bob")])
