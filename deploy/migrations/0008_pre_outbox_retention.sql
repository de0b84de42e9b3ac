-- migrate:up transaction:false

-- Each part is a transaction of its own and may be run again: no lock of one part is held during another.
BEGIN;

-- The outbox's partitions are numbered: n holds ids from n times this on. Deliveries have the same bounds, by to_id.
CREATE OR REPLACE FUNCTION outbox_partition_size() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1::bigint << 26;

-- Bounds [low, high) of the partitions of outbox or outbox_delivery.
CREATE OR REPLACE FUNCTION outbox_partitions(p_parent regclass) RETURNS TABLE (name name, low bigint, high bigint)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.relname, b.bounds[1]::bigint, b.bounds[2]::bigint
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL (
        SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(\d+)''\) TO \(''(\d+)''\)') AS bounds
    ) AS b
    WHERE i.inhparent = p_parent AND b.bounds IS NOT NULL;  -- null: it has been dropped since our snapshot
END;

-- The id that will be drawn next; the current partition is the one that it falls into.
CREATE OR REPLACE FUNCTION next_outbox_id() RETURNS bigint
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    SELECT last_value + is_called::int FROM outbox_id_seq;
END;

-- The relay changes partitions by the functions below alone. One relay at a time does; another gets null at once. None
-- waits for longer than its lock_timeout (LockNotAvailable then), so nobody waits longer for it.
CREATE OR REPLACE FUNCTION try_outbox_retention() RETURNS boolean
LANGUAGE sql VOLATILE
RETURN pg_try_advisory_xact_lock(20818, 0);

-- Makes what is missing of the current partition and so many ahead of it; how many were made. A table is made by itself
-- and then attached, which is compatible with every reader and writer; it is empty, so there is nothing to check.
CREATE OR REPLACE FUNCTION make_outbox_partitions(p_ahead int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_size bigint := outbox_partition_size();
    v_current bigint := next_outbox_id() / v_size;
    v_made int := 0;
    v_parent text;
    v_number bigint;
    v_name text;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    FOREACH v_parent IN ARRAY ARRAY['outbox_delivery', 'outbox'] LOOP
        FOR v_number IN
            SELECT n FROM generate_series(v_current, v_current + p_ahead) AS n
            WHERE NOT EXISTS (
                SELECT FROM outbox_partitions(v_parent::regclass) AS p WHERE n * v_size >= p.low AND n * v_size < p.high)
            ORDER BY n
        LOOP
            v_name := v_parent || '_p' || v_number;
            EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', v_name, v_parent);
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                v_parent, v_name, v_number * v_size, (v_number + 1) * v_size);
            v_made := v_made + (v_parent = 'outbox')::int;
        END LOOP;
    END LOOP;
    RETURN v_made;
END $$;

-- Lets ids go on in the next partition once the current one's first row is older than p_period, so that what was
-- deleted is forgotten in time however few rows there are. Returns the next id, or null if there was nothing to do.
--
-- Whoever inserts into outbox holds ROW EXCLUSIVE on it from before the id is drawn until the commit. Under the lock
-- taken here no id is drawn that is not committed, and none can be drawn: the sequence moves forward only, every later
-- id is larger than every earlier one, and a shard's ids stay in the order of commits.
CREATE OR REPLACE FUNCTION close_outbox_partition(p_period interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_size bigint := outbox_partition_size();
    v_low bigint := next_outbox_id() / v_size * v_size;
    v_next bigint := v_low + v_size;
    v_begun timestamptz;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    SELECT min(o.created_at) INTO v_begun
    FROM outbox_shard AS s
    CROSS JOIN LATERAL (
        SELECT n.created_at FROM outbox AS n
        WHERE n.shard = s.shard AND n.id >= v_low AND n.id < v_next
        ORDER BY n.id LIMIT 1
    ) AS o;
    IF v_begun IS NULL OR v_begun > clock_timestamp() - p_period THEN
        RETURN NULL;
    END IF;
    IF (SELECT count(*) FROM outbox_partitions('outbox') AS p WHERE p.low = v_next)
        + (SELECT count(*) FROM outbox_partitions('outbox_delivery') AS p WHERE v_next >= p.low AND v_next < p.high) < 2 THEN
        RETURN NULL;
    END IF;

    LOCK TABLE ONLY outbox IN SHARE ROW EXCLUSIVE MODE;
    IF next_outbox_id() >= v_next THEN
        RETURN NULL;
    END IF;
    -- As if the id before had been drawn, so that the sequence shows the next one, too.
    PERFORM setval('outbox_id_seq', v_next - 1);
    RETURN v_next;
END $$;

-- Why a closed partition must stay: 'young', its newest row was written after p_before; 'unresolved', a row of it is not
-- published yet or in an open queue. Null if nothing speaks for it.
CREATE OR REPLACE FUNCTION outbox_partition_is_needed(p_low bigint, p_high bigint, p_before timestamptz) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = public, pg_temp AS $$
DECLARE
    v_newest timestamptz;
    v_unsent boolean;
BEGIN
    SELECT max(o.created_at), bool_or(o.id > s.cursor_id) INTO v_newest, v_unsent
    FROM outbox_shard AS s
    CROSS JOIN LATERAL (
        SELECT n.id, n.created_at FROM outbox AS n
        WHERE n.shard = s.shard AND n.id >= p_low AND n.id < p_high
        ORDER BY n.id DESC LIMIT 1
    ) AS o;
    RETURN CASE
        WHEN v_newest >= p_before THEN 'young'
        WHEN v_unsent THEN 'unresolved'
        WHEN EXISTS (
            SELECT FROM outbox_parked WHERE id >= p_low AND id < p_high AND state IN ('waiting', 'failed'))
        THEN 'unresolved'
    END;
END $$;

-- Drops the oldest partition of outbox if it is closed and needed no more. Returns 'dropped', why it stays ('young',
-- 'unresolved'), or 'none' if no partition is closed.
--
-- It is looked at twice: without a lock, and once nobody reads outbox any more, since a rewind reads it before it takes a
-- cursor back. Deliveries that reach over its end are cut there, so that the rank of a row can still be counted: at most
-- one move of each shard's cursor went over it, so these are among the first that end behind it.
CREATE OR REPLACE FUNCTION drop_outbox_partition(p_retention interval) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_before timestamptz := clock_timestamp() - p_retention;
    v_name name;
    v_low bigint;
    v_high bigint;
    v_needed text;
    v_shards smallint[];
    v_from_ids bigint[];
    v_to_ids bigint[];
    v_topics text[];
    v_before_cut bigint[];
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    SELECT p.name, p.low, p.high INTO v_name, v_low, v_high FROM outbox_partitions('outbox') AS p ORDER BY p.low LIMIT 1;
    IF v_high IS NULL OR v_high > next_outbox_id() THEN
        RETURN 'none';
    END IF;
    v_needed := outbox_partition_is_needed(v_low, v_high, v_before);
    IF v_needed IS NOT NULL THEN
        RETURN v_needed;
    END IF;
    SELECT array_agg(d.shard), array_agg(d.from_id), array_agg(d.to_id), array_agg(d.topic),
           array_agg((SELECT count(*) FROM outbox AS o
                      WHERE o.shard = d.shard AND o.id >= d.from_id AND o.id < v_high AND o.topic = d.topic)
                   - (SELECT count(*) FROM outbox_parked AS p
                      WHERE p.shard = d.shard AND p.id >= d.from_id AND p.id < v_high AND p.topic = d.topic))
    INTO v_shards, v_from_ids, v_to_ids, v_topics, v_before_cut
    FROM outbox_shard AS s
    CROSS JOIN LATERAL (
        SELECT n.shard, n.from_id, n.to_id, n.topic FROM outbox_delivery AS n
        WHERE n.shard = s.shard AND n.to_id >= v_high
        ORDER BY n.to_id LIMIT 100
    ) AS d
    WHERE d.from_id < v_high;

    LOCK TABLE ONLY outbox IN ACCESS EXCLUSIVE MODE;
    v_needed := outbox_partition_is_needed(v_low, v_high, v_before);
    IF v_needed IS NOT NULL THEN
        RETURN v_needed;
    END IF;
    -- Everybody else waits by now: a partition that is just being vacuumed is left for the next time.
    PERFORM set_config('lock_timeout', '10ms', true);
    UPDATE outbox_delivery AS d
    SET base_offset = d.base_offset + c.rows,
        from_id = (SELECT o.id FROM outbox AS o WHERE o.shard = d.shard AND o.id >= v_high ORDER BY o.id LIMIT 1)
    FROM unnest(v_shards, v_from_ids, v_to_ids, v_topics, v_before_cut) AS c (shard, from_id, to_id, topic, rows)
    WHERE d.shard = c.shard AND d.to_id = c.to_id AND d.topic = c.topic AND d.from_id = c.from_id;
    EXECUTE format('DROP TABLE %I', v_name);
    RETURN 'dropped';
END $$;

-- Drops the oldest partition of deliveries if every outbox row that it could tell of is gone; whether it did.
CREATE OR REPLACE FUNCTION drop_delivery_partition() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_name name;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    SELECT p.name INTO v_name
    FROM outbox_partitions('outbox_delivery') AS p
    WHERE p.high <= (SELECT min(o.low) FROM outbox_partitions('outbox') AS o)
    ORDER BY p.low LIMIT 1;
    IF v_name IS NULL THEN
        RETURN false;
    END IF;
    LOCK TABLE ONLY outbox_delivery IN ACCESS EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', '10ms', true);
    EXECUTE format('DROP TABLE %I', v_name);
    RETURN true;
END $$;

-- Forgets settled parked rows whose outbox rows are gone, at most p_limit, with their attempts; those of a dead letter
-- stay with it. Returns how many rows were forgotten.
CREATE OR REPLACE FUNCTION forget_parked(p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_first bigint := (SELECT min(p.low) FROM outbox_partitions('outbox') AS p);
    v_forgotten int;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    WITH old AS (
        SELECT o.shard, o.id
        FROM outbox_shard AS s
        CROSS JOIN LATERAL (
            SELECT p.shard, p.id FROM outbox_parked AS p
            WHERE p.shard = s.shard AND p.id < v_first AND p.state IN ('sent', 'dead')
            ORDER BY p.id LIMIT p_limit
        ) AS o
        LIMIT p_limit
    ), gone AS (
        DELETE FROM outbox_parked AS p USING old WHERE p.shard = old.shard AND p.id = old.id
        RETURNING p.shard, p.id
    ), attempts AS (
        DELETE FROM outbox_attempt AS a USING gone
        WHERE a.shard = gone.shard AND a.id = gone.id
            AND NOT EXISTS (SELECT FROM dead_letter AS d WHERE d.shard = gone.shard AND d.outbox_id = gone.id)
    )
    SELECT count(*) INTO v_forgotten FROM gone;
    RETURN v_forgotten;
END $$;

-- Forgets at most p_limit dead letters that were settled, or died and were left alone, before p_retention, with their
-- actions, and with their attempts unless the outbox still has the row. Returns them, for the log.
CREATE OR REPLACE FUNCTION expire_letters(p_retention interval, p_limit int)
RETURNS TABLE (dead_id bigint, state text, event_id uuid, conversation_id uuid, topic text, error text, died_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz := clock_timestamp() - p_retention;
    v_old bigint[];
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.dead_id) INTO v_old
    FROM (
        (SELECT d.dead_id FROM dead_letter AS d
         WHERE d.state IN ('sent', 'discarded', 'rewound') AND d.settled_at < v_before
         ORDER BY d.settled_at LIMIT p_limit)
        UNION ALL
        (SELECT n.dead_id
         FROM outbox_shard AS s
         CROSS JOIN LATERAL (
             SELECT d.dead_id FROM dead_letter AS d
             WHERE d.shard = s.shard AND d.state IN ('dead', 'retrying') AND d.died_at < v_before
                 -- Somebody asked for it, and it is still to be tried.
                 AND (d.state = 'dead' OR NOT EXISTS (
                     SELECT FROM dead_letter_action AS a WHERE a.dead_id = d.dead_id AND a.at >= v_before))
             ORDER BY d.died_at LIMIT p_limit
         ) AS n
         LIMIT p_limit)
    ) AS o;

    RETURN QUERY
    WITH locked AS (
        -- One that a relay or a person is just changing is left for the next time, as one that they have changed since.
        SELECT d.dead_id FROM dead_letter AS d
        WHERE d.dead_id = ANY (v_old) AND coalesce(d.settled_at, d.died_at) < v_before
            AND (d.state <> 'retrying' OR NOT EXISTS (
                SELECT FROM dead_letter_action AS a WHERE a.dead_id = d.dead_id AND a.at >= v_before))
        ORDER BY d.dead_id
        FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM dead_letter AS d USING locked
        WHERE d.dead_id = locked.dead_id
        RETURNING d.dead_id, d.state, d.shard, d.outbox_id, d.event_id, d.conversation_id, d.topic, d.error, d.died_at
    ), actions AS (
        DELETE FROM dead_letter_action AS a USING gone WHERE a.dead_id = gone.dead_id
    ), attempts AS (
        DELETE FROM outbox_attempt AS a USING gone
        WHERE a.shard = gone.shard AND a.id = gone.outbox_id
            AND NOT EXISTS (SELECT FROM outbox_parked AS p WHERE p.shard = gone.shard AND p.id = gone.outbox_id)
    )
    SELECT g.dead_id, g.state, g.event_id, g.conversation_id, g.topic, g.error, g.died_at FROM gone AS g;
END $$;

REVOKE EXECUTE ON FUNCTION try_outbox_retention, make_outbox_partitions, close_outbox_partition, outbox_partition_is_needed,
    drop_outbox_partition, drop_delivery_partition, forget_parked, expire_letters FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_outbox_partitions, close_outbox_partition, drop_outbox_partition, drop_delivery_partition,
    forget_parked, expire_letters TO waybill_relay;

CREATE INDEX IF NOT EXISTS outbox_parked_open ON outbox_parked (id) WHERE state IN ('waiting', 'failed');
-- The relay looks for these twice a second, however many others are open.
CREATE INDEX IF NOT EXISTS dead_letter_retrying ON dead_letter (died_at, dead_id) WHERE state = 'retrying';
CREATE INDEX IF NOT EXISTS dead_letter_settled ON dead_letter (settled_at) WHERE state IN ('sent', 'discarded', 'rewound');

COMMIT;

-- Deliveries become partitioned; the table that there is becomes the first partition, up to the end of the outbox
-- partition after the current one. What proves that it fits is checked beforehand, beside its readers and writers.
BEGIN;
DO $$
DECLARE
    v_high bigint := (next_outbox_id() / outbox_partition_size() + 2) * outbox_partition_size();
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'outbox_delivery'::regclass) = 'p' THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', '200ms', true);
    FOR try IN 1..100 LOOP
        BEGIN
            ALTER TABLE outbox_delivery DROP CONSTRAINT IF EXISTS outbox_delivery_first;
            EXECUTE format(
                'ALTER TABLE outbox_delivery ADD CONSTRAINT outbox_delivery_first CHECK (to_id >= 0 AND to_id < %s) NOT VALID',
                v_high);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.2 * random());
        END;
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'outbox_delivery is locked by somebody for long: migrate again later';
END $$;
COMMIT;

BEGIN;
DO $$
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'outbox_delivery'::regclass) <> 'p' THEN
        ALTER TABLE outbox_delivery VALIDATE CONSTRAINT outbox_delivery_first;
    END IF;
END $$;
COMMIT;

BEGIN;
DO $$
DECLARE
    v_size bigint := outbox_partition_size();
    v_high bigint;
    v_number bigint;
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = 'outbox_delivery'::regclass) = 'p' THEN
        RETURN;
    END IF;
    SELECT substring(pg_get_constraintdef(oid) FROM 'to_id < ''?(\d+)')::bigint INTO STRICT v_high
    FROM pg_constraint WHERE conname = 'outbox_delivery_first' AND conrelid = 'outbox_delivery'::regclass;

    PERFORM set_config('lock_timeout', '200ms', true);
    FOR try IN 1..100 LOOP
        BEGIN
            LOCK TABLE outbox_delivery IN ACCESS EXCLUSIVE MODE;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF try = 100 THEN
                RAISE;
            END IF;
            PERFORM pg_sleep(0.2 * random());
        END;
    END LOOP;
    ALTER TABLE outbox_delivery RENAME TO outbox_delivery_p0;
    ALTER INDEX outbox_delivery_by_id RENAME TO outbox_delivery_p0_by_id;

    -- A row per batch that Kafka confirmed. The offset of a row is base_offset plus its rank among the batch's rows.
    CREATE TABLE outbox_delivery (
        shard smallint NOT NULL,
        from_id bigint NOT NULL,
        to_id bigint NOT NULL,
        topic text NOT NULL,
        partition int NOT NULL,
        base_offset bigint NOT NULL,
        owner text NOT NULL,
        epoch bigint NOT NULL,
        acked_at timestamptz NOT NULL DEFAULT clock_timestamp()
    ) PARTITION BY RANGE (to_id);
    CREATE INDEX outbox_delivery_by_id ON outbox_delivery (shard, to_id, topic);
    EXECUTE format('ALTER TABLE outbox_delivery ATTACH PARTITION outbox_delivery_p0 FOR VALUES FROM (0) TO (%s)', v_high);
    ALTER TABLE outbox_delivery_p0 DROP CONSTRAINT outbox_delivery_first;
    FOR v_number IN SELECT p.low / v_size FROM outbox_partitions('outbox') AS p WHERE p.low >= v_high ORDER BY p.low LOOP
        EXECUTE format('CREATE TABLE outbox_delivery_p%s PARTITION OF outbox_delivery FOR VALUES FROM (%s) TO (%s)',
            v_number, v_number * v_size, (v_number + 1) * v_size);
    END LOOP;
    GRANT SELECT, INSERT ON outbox_delivery TO waybill_relay;
    GRANT SELECT ON outbox_delivery TO waybill_console;
END $$;
COMMIT;

-- migrate:down
