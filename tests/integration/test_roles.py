"""Each service's role may do its own work and nothing else."""

import asyncpg
import pytest

from tests.databases import Database

SOME_ROW = "(shard, conversation_id, event_id, topic, type, source, payload, created_at) VALUES (1, gen_random_uuid(), "
FOR_THE_OUTBOX = f"INSERT INTO outbox {SOME_ROW}gen_random_uuid(), '', '', '', '', now())"

FOR_THE_DESK = (
    "SELECT FROM dead_letter",
    "SELECT FROM outbox_parked",
    "SELECT FROM outbox_attempt",
    "SELECT rewind_shard(1::smallint, 1, 'x')",
    "SELECT resume_shard(1::smallint)",
)

BURIED = "'{1}', '{1}', '{a}', '{a}', NULL, '{x}')"
FOR_CONSUMERS = {
    "receipts": (
        f"SELECT bury_records('acks.v1', 'c', {BURIED}",
        "SELECT claim_letters('acks.v1', 'o', '1 s', 1)",
        "SELECT settle_claimed('receipts', 'acks.v1', 'o', '1 s', 1, 1, NULL)",
    ),
    "gateway": (f"SELECT bury_stream_records('events.v1', 'c', {BURIED}",),
}
FOR_NOBODY = (
    f"SELECT keep_records('receipts', 'acks.v1', 'c', {BURIED}",
    "SELECT FROM letter_lease",
    "INSERT INTO dead_letter_attempt VALUES (1, 1, now(), NULL, 'x')",
)

FOR_WHO_ERASES = {
    "relay": (
        "SELECT expire_bodies(1, 1, '1 s')",
        "SELECT erasures_to_vacuum('1 s')",
        "SELECT erasures_vacuumed('1', now())",
        "VACUUM event",
    ),
    "ingest": (
        "INSERT INTO erasure (conversation_id, from_seq, to_seq, events, cause) VALUES (NULL, 1, 1, 1, 'delete')",
    ),
    "console": ("SELECT set_retention(NULL, '1 day', false, 'x')",),
}

FOR_THE_GATEWAY = "SELECT open_sessions('{a}', '{p}', '{00000000-0000-0000-0000-000000000000}', 'g', '{1}', '{j}')"

FORBIDDEN = {
    "ingest": (
        "DELETE FROM event",
        "UPDATE event SET seq = 9",
        "UPDATE event SET sender_id = 'x'",
        "UPDATE event SET digest = ''",
        "UPDATE conversation SET shard = 1",
        "UPDATE conversation SET creator_id = 'x'",
        "DELETE FROM member",
        "UPDATE member SET muted = true",
        "SELECT FROM event_count",
        "INSERT INTO event_count VALUES (gen_random_uuid(), '', 0, 1)",
        "SELECT FROM outbox",
        "UPDATE outbox SET seq = 1",
        "DELETE FROM outbox",
        "SELECT setval('outbox_id_seq', 1)",
        "UPDATE outbox_shard SET epoch = 1",
        "SELECT delivered FROM receipt",
        "UPDATE receipt SET read_seq = 9",
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
        "DELETE FROM outbox_parked",
        "UPDATE outbox_attempt SET error = 'x'",
        "DELETE FROM outbox_attempt",
        "UPDATE dead_letter SET payload = ''",
        "UPDATE dead_letter SET event_id = gen_random_uuid()",
        "SELECT FROM dead_letter_action",
        "UPDATE dead_letter_action SET who = 'x'",
        "SELECT rewind_shard(1::smallint, 1, 'x')",
        "SELECT resume_shard(1::smallint)",
        "SELECT FROM event",
        "UPDATE event SET body = NULL",
        "TRUNCATE event",
        "DELETE FROM erasure",
        "SELECT FROM retention_policy",
        "SELECT FROM member",
        "SELECT FROM receipt",
        "UPDATE outbox_journal SET cursor_id = 1",
        "SELECT write_journal('{1}', 1)",
        "SELECT FROM transition",
    ),
    "gateway": (
        "UPDATE event SET body = NULL",
        "UPDATE member SET role = 'admin'",
        "UPDATE member SET muted = true",
        "UPDATE event_count SET amount = 1",
        "SELECT close_late(gen_random_uuid(), 1)",
        "SELECT unread_in_all('a')",
        "SELECT set_settings(gen_random_uuid(), 'a', true, NULL, NULL, NULL, NULL)",
        "UPDATE receipt SET read_seq = 1",
        "DELETE FROM device_cursor",
        "SELECT FROM ack_offset",
        FOR_THE_OUTBOX,
        "UPDATE outbox SET seq = 1",
        "DELETE FROM outbox",
        "SELECT nextval('outbox_id_seq')",
        "SELECT lock_outbox_shards('{1}')",
        "SELECT create_conversation(gen_random_uuid(), 1::smallint, 'group', NULL, 'all', 'a', '{a}', '{}', '')",
        "UPDATE device_session SET number = 1",
        "INSERT INTO device_session VALUES ('a', 'a', 1, gen_random_uuid(), 'g', now())",
        "DELETE FROM device_session",
        "INSERT INTO revocation (user_id) VALUES ('a')",
        "DELETE FROM revocation",
        "SELECT forget_revocations()",
        "SELECT FROM transition",
        "DELETE FROM transition",
        "SELECT drop_transition_partition('1 s')",
        "SELECT journal_outbox('x', '{1}', '{1}', 1)",
        "UPDATE store SET incarnation = gen_random_uuid()",
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
        "INSERT INTO retention_policy (age, set_by) VALUES ('1 day', 'x')",
        "DELETE FROM erasure",
        "SELECT erase_copies('{}')",
        "UPDATE outbox_shard SET epoch = 1",
        "UPDATE receipt SET read_seq = 1",
        "DELETE FROM outbox_delivery",
        "SELECT nextval('outbox_id_seq')",
        "SELECT lock_outbox_shards('{1}')",
        "INSERT INTO dead_letter DEFAULT VALUES",
        "DELETE FROM dead_letter",
        "UPDATE dead_letter SET payload = ''",
        "UPDATE dead_letter SET headers = '{}'",
        "UPDATE dead_letter SET error = 'x'",
        "UPDATE dead_letter SET attempts = 0",
        "UPDATE dead_letter SET passed = false",
        "UPDATE dead_letter SET kafka_offset = 1",
        "UPDATE outbox_dead SET state = 'sent'",
        "UPDATE dead_letter_action SET who = 'x'",
        "DELETE FROM dead_letter_action",
        "UPDATE outbox_parked SET state = 'sent'",
        "DELETE FROM outbox_parked",
        "DELETE FROM outbox_attempt",
        "SELECT bury_parked(1::smallint, '{1}')",
        "SELECT settle_letter('x', 1, 1::smallint, 1, 1, NULL, NULL)",
        "SELECT redrive_letters(now(), 1, 'x')",
        "INSERT INTO revocation (user_id, created_at) VALUES ('a', now())",
        "DELETE FROM revocation",
        "INSERT INTO transition (service, kind, cause) VALUES ('c', 'k', 'c')",
        "UPDATE device_session SET number = 1",
        "UPDATE outbox_journal SET cursor_id = 1",
        "SELECT skip_journal('1 s')",
    ),
}


@pytest.mark.parametrize("role", FORBIDDEN)
async def test_what_a_role_may_not_do(database: Database, role: str) -> None:
    connection = await asyncpg.connect(database.url(role))
    desk = () if role in ("relay", "console") else FOR_THE_DESK
    others = [statement for owner, some in FOR_CONSUMERS.items() if owner != role for statement in some]
    gate = () if role == "gateway" else (FOR_THE_GATEWAY,)
    # Without the privilege a vacuum is passed over with a warning.
    others += [one for owner, some in FOR_WHO_ERASES.items() if owner != role for one in some if "VACUUM" not in one]
    try:
        ddl = "CREATE TABLE other (a int)", "DROP TABLE event", "TRUNCATE outbox"
        for statement in (*FORBIDDEN[role], *desk, *gate, *others, *FOR_NOBODY, *ddl):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
        is_ordinary = (
            "SELECT NOT (rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls OR rolreplication) FROM pg_roles"
        )
        assert await connection.fetchval(f"{is_ordinary} WHERE rolname = current_user")
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("role", "most_ms"),
    [("ingest", 10_000), ("relay", 10_000), ("gateway", 10_000), ("receipts", 10_000), ("console", 30_000)],
)
async def test_a_writer_that_hangs_is_ended(database: Database, role: str, most_ms: int) -> None:
    connection = await asyncpg.connect(database.url(role))
    try:
        for name in ("idle_in_transaction_session_timeout", "lock_timeout", "transaction_timeout", "tcp_user_timeout"):
            limit = await connection.fetchval("SELECT setting::int FROM pg_settings WHERE name = $1", name)
            assert 0 < limit <= most_ms, name
    finally:
        await connection.close()


@pytest.mark.parametrize("role", FOR_CONSUMERS)
async def test_a_consumer_puts_on_the_desk_what_it_read(database: Database, role: str) -> None:
    connection = await asyncpg.connect(database.url(role))
    try:
        for statement in FOR_CONSUMERS[role]:
            await connection.fetch(statement)
    finally:
        await connection.close()


async def test_who_erases_may_do_that_and_no_more(database: Database) -> None:
    for role in ("relay", "console"):
        connection = await asyncpg.connect(database.url(role))
        for statement in FOR_WHO_ERASES[role]:
            await connection.execute(statement)
        await connection.close()


async def test_nobody_forges_a_letter_of_another(database: Database) -> None:
    for role, function, origin in (
        ("receipts", "bury_records", "outbox"),
        ("gateway", "bury_stream_records", "outbox"),
        ("gateway", "bury_stream_records", "acks.v1"),
    ):
        connection = await asyncpg.connect(database.url(role))
        with pytest.raises(asyncpg.RaiseError):
            await connection.execute(f"SELECT {function}('{origin}', 'c', {BURIED}")
        await connection.close()


async def test_all_may_say_what_they_changed(database: Database) -> None:
    for role in ("ingest", "relay", "gateway", "receipts"):
        connection = await asyncpg.connect(database.url(role))
        await connection.execute("INSERT INTO transition (service, kind, cause) VALUES ($1, 'k', 'c')", role)
        await connection.close()
    connection = await asyncpg.connect(database.url("console"))
    assert await connection.fetchval("SELECT count(*) FROM transition") == 4
    await connection.execute("INSERT INTO revocation (user_id, reason) VALUES ('a', 'lost phone')")
    await connection.close()
    connection = await asyncpg.connect(database.url("gateway"))
    assert await connection.fetchval(FOR_THE_GATEWAY) is None  # the token is void
    assert await connection.fetchval(FOR_THE_GATEWAY.replace("{a}", "{b}")) == (1, 1)
    await connection.close()
