-- migrate:up transaction:false

-- A row by its event. Event ids are UUIDv7 and rows are appended, so ids and places run side by side: block ranges find a
-- row as well as a tree would, at a fraction of its cost for the writers (docs/operations/tracing.md has the figures).
-- The parent's index is made for itself first, then those of partitions that nobody writes to.
BEGIN;
DO $$
BEGIN
    PERFORM set_config('lock_timeout', '200ms', true);
    FOR try IN 1..100 LOOP
        BEGIN
            CREATE INDEX IF NOT EXISTS outbox_by_event ON ONLY outbox USING brin (event_id);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.2 * random());
        END;
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'outbox is locked by somebody for long: migrate again later';
END $$;
COMMIT;

-- Gives one partition its index, if it has none; false if its lock is not to be had now.
BEGIN;
CREATE OR REPLACE FUNCTION index_outbox_partition(p_name name) RETURNS boolean
LANGUAGE plpgsql SET search_path = public, pg_temp SET lock_timeout = '200ms' AS $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_inherits AS i JOIN pg_index AS x ON x.indexrelid = i.inhrelid
        WHERE i.inhparent = 'outbox_by_event'::regclass AND x.indrelid = p_name::text::regclass)
    THEN
        RETURN true;
    END IF;
    EXECUTE format('CREATE INDEX %I ON %I USING brin (event_id)', p_name || '_by_event', p_name);
    EXECUTE format('ALTER INDEX outbox_by_event ATTACH PARTITION %I', p_name || '_by_event');
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
COMMIT;

-- Partitions ahead are empty. Then ids go on there, and the one that was written to has no writer any more.
BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        EXIT WHEN (
            SELECT bool_and(index_outbox_partition(p.name)) FROM outbox_partitions('outbox') AS p
            WHERE p.low >= next_outbox_id());
        PERFORM pg_sleep(0.2 * random());
    END LOOP;
END $$;
COMMIT;

BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        BEGIN
            PERFORM close_outbox_partition('0 s');
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.2 * random());
        END;
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'outbox is locked by somebody for long: migrate again later';
END $$;
COMMIT;

BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        IF (SELECT bool_and(index_outbox_partition(p.name)) FROM outbox_partitions('outbox') AS p) THEN
            RETURN;
        END IF;
        PERFORM pg_sleep(0.2 * random());
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'a partition of outbox is locked by somebody for long: migrate again later';
END $$;
DROP FUNCTION index_outbox_partition;
COMMIT;

BEGIN;

-- Brings the block ranges of the newest rows into the index: a row that was written since is found by reading them all.
-- Returns how many ranges were new.
CREATE OR REPLACE FUNCTION summarise_outbox() RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    RETURN (
        SELECT sum(brin_summarize_new_values(i.inhrelid::regclass))
        FROM pg_inherits AS i
        JOIN pg_index AS x ON x.indexrelid = i.inhrelid
        JOIN pg_class AS c ON c.oid = x.indrelid
        WHERE i.inhparent = 'outbox_by_event'::regclass
            AND c.relname IN (
                SELECT p.name FROM outbox_partitions('outbox') AS p
                WHERE p.low <= next_outbox_id()
                ORDER BY p.low DESC LIMIT 2));
END $$;
REVOKE EXECUTE ON FUNCTION summarise_outbox FROM PUBLIC;
GRANT EXECUTE ON FUNCTION summarise_outbox TO waybill_relay;

-- Where each row of the outbox is: PENDING, SENDING, SENT, FAILED (parked, with its next retry) or DEAD. A row that was
-- never parked stands in the delivery that covers it, at the rank that it has there among the rows of its shard and
-- topic; its offset is null where that cannot be counted, since the delivery's first row is gone.
CREATE OR REPLACE VIEW outbox_state AS
SELECT
    o.shard, o.id, o.conversation_id, o.seq, o.event_id, o.topic, o.type, o.created_at,
    CASE
        WHEN p.state = 'waiting' THEN 'PENDING'
        WHEN p.state IS NOT NULL THEN upper(p.state)
        WHEN o.id <= s.cursor_id THEN 'SENT'
        WHEN s.lease_until > clock_timestamp() AND s.stopped_at IS NULL THEN 'SENDING'
        ELSE 'PENDING'
    END AS state,
    CASE WHEN p.state IS NULL THEN (o.id <= s.cursor_id)::int ELSE greatest(p.attempts, a.attempt) END AS attempts,
    p.retry_at,
    e.error,
    CASE WHEN p.state = 'waiting' THEN (
        SELECT min(q.id) FROM outbox_parked AS q
        WHERE q.shard = p.shard AND q.conversation_id = p.conversation_id AND q.topic = p.topic AND q.id < p.id
            AND q.state IN ('waiting', 'failed'))
    END AS waits_for,
    CASE WHEN p.state = 'sent' THEN o.shard::int ELSE d.partition END AS partition,
    CASE
        WHEN p.state = 'sent' THEN p.kafka_offset
        WHEN EXISTS (SELECT FROM outbox AS f WHERE f.shard = o.shard AND f.id = d.from_id)
        THEN d.base_offset
            + (SELECT count(*) FROM outbox AS r
               WHERE r.shard = o.shard AND r.id >= d.from_id AND r.id < o.id AND r.topic = o.topic)
            - (SELECT count(*) FROM outbox_parked AS q
               WHERE q.shard = o.shard AND q.id >= d.from_id AND q.id < o.id AND q.topic = o.topic)
    END AS kafka_offset,
    CASE WHEN p.state = 'sent' THEN p.settled_at ELSE d.acked_at END AS acked_at,
    CASE WHEN p.state IS NOT NULL THEN a.owner WHEN o.id <= s.cursor_id THEN d.owner
         WHEN s.lease_until > clock_timestamp() THEN s.owner END AS owner,
    CASE WHEN p.state IS NOT NULL THEN a.epoch WHEN o.id <= s.cursor_id THEN d.epoch
         WHEN s.lease_until > clock_timestamp() THEN s.epoch END AS epoch
FROM outbox AS o
JOIN outbox_shard AS s ON s.shard = o.shard
LEFT JOIN outbox_parked AS p ON p.shard = o.shard AND p.id = o.id
LEFT JOIN LATERAL (
    SELECT n.attempt, n.owner, n.epoch FROM outbox_attempt AS n
    WHERE n.shard = p.shard AND n.id = p.id
    ORDER BY n.attempt DESC LIMIT 1
) AS a ON true
LEFT JOIN LATERAL (
    SELECT n.error FROM outbox_attempt AS n
    WHERE n.shard = p.shard AND n.id = p.id AND n.error IS NOT NULL
    ORDER BY n.attempt DESC LIMIT 1
) AS e ON true
LEFT JOIN LATERAL (
    SELECT n.* FROM outbox_delivery AS n
    WHERE p.state IS NULL AND o.id <= s.cursor_id AND n.shard = o.shard AND n.topic = o.topic AND n.to_id >= o.id
    ORDER BY n.to_id LIMIT 1
) AS d ON d.from_id <= o.id;
GRANT SELECT ON outbox_state TO waybill_console;

COMMIT;

-- migrate:down
