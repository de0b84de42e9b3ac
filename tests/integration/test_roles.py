"""Each service's role may do its own work and nothing else."""

import asyncpg
import pytest

from tests.databases import Database

SOME_ROW = "(shard, conversation_id, event_id, topic, type, source, payload, created_at) VALUES (1, gen_random_uuid(), "
FOR_THE_OUTBOX = f"INSERT INTO outbox {SOME_ROW}gen_random_uuid(), '', '', '', '', now())"

FORBIDDEN = {
    "ingest": (
        "DELETE FROM event",
        "UPDATE event SET seq = 9",
        "UPDATE event SET sender_id = 'x'",
        "UPDATE event SET digest = ''",
        "UPDATE conversation SET shard = 1",
        "UPDATE conversation SET creator_id = 'x'",
        "DELETE FROM member",
        "SELECT FROM outbox",
        "UPDATE outbox SET seq = 1",
        "DELETE FROM outbox",
        "SELECT setval('outbox_id_seq', 1)",
        "UPDATE outbox_shard SET epoch = 1",
        "SELECT FROM receipt",
        "SELECT FROM device_cursor",
        "UPDATE store SET incarnation = gen_random_uuid()",
    ),
    "relay": (
        FOR_THE_OUTBOX,
        "UPDATE outbox SET seq = 1",
        "DELETE FROM outbox",
        "SELECT nextval('outbox_id_seq')",
        "SELECT lock_outbox_shards('{1}')",
        "DELETE FROM outbox_shard",
        "UPDATE outbox_delivery SET base_offset = 1",
        "DELETE FROM outbox_delivery",
        "SELECT FROM event",
        "SELECT FROM member",
        "SELECT FROM receipt",
    ),
    "gateway": (
        "UPDATE event SET body = NULL",
        "UPDATE member SET role = 'admin'",
        "UPDATE receipt SET read_seq = 1",
        "DELETE FROM device_cursor",
        "SELECT FROM ack_offset",
        FOR_THE_OUTBOX,
        "SELECT lock_outbox_shards('{1}')",
        "SELECT create_conversation(gen_random_uuid(), 1::smallint, 'group', NULL, 'all', 'a', '{a}', '{}', '')",
    ),
    "receipts": (
        "SELECT FROM event",
        "UPDATE member SET role = 'admin'",
        "UPDATE conversation SET last_seq = 1",
        "DELETE FROM receipt",
        "DELETE FROM ack_offset",
        "SELECT FROM outbox",
        "UPDATE outbox SET seq = 1",
        "UPDATE outbox_shard SET epoch = 1",
        "SELECT create_conversation(gen_random_uuid(), 1::smallint, 'group', NULL, 'all', 'a', '{a}', '{}', '')",
    ),
    "console": (
        "DELETE FROM event",
        "UPDATE outbox_shard SET epoch = 1",
        "UPDATE receipt SET read_seq = 1",
        "DELETE FROM outbox_delivery",
        "SELECT nextval('outbox_id_seq')",
        "SELECT lock_outbox_shards('{1}')",
    ),
}


@pytest.mark.parametrize("role", FORBIDDEN)
async def test_what_a_role_may_not_do(database: Database, role: str) -> None:
    connection = await asyncpg.connect(database.url(role))
    try:
        for statement in (*FORBIDDEN[role], "CREATE TABLE other (a int)", "DROP TABLE event", "TRUNCATE outbox"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
        is_ordinary = (
            "SELECT NOT (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls OR rolreplication) FROM pg_roles"
        )
        assert await connection.fetchval(f"{is_ordinary} WHERE rolname = current_user")
    finally:
        await connection.close()


@pytest.mark.parametrize("role", ["ingest", "relay", "receipts"])
async def test_a_writer_that_hangs_is_ended(database: Database, role: str) -> None:
    connection = await asyncpg.connect(database.url(role))
    try:
        for name in ("idle_in_transaction_session_timeout", "lock_timeout", "transaction_timeout", "tcp_user_timeout"):
            limit = await connection.fetchval("SELECT setting::int FROM pg_settings WHERE name = $1", name)
            assert 0 < limit <= 10_000, name
    finally:
        await connection.close()
