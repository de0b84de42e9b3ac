-- migrate:up

-- Which life of which store this is: the store's random id, and the WAL timeline, which every promotion of a standby
-- raises. After either of them changed, a seq may belong to another event. Null on a standby, which is nobody's store.
CREATE FUNCTION store_incarnation() RETURNS text
LANGUAGE sql STABLE
RETURN (
    SELECT CASE WHEN pg_is_in_recovery() THEN NULL
                ELSE s.incarnation || '-' || lower(left(pg_walfile_name(pg_current_wal_lsn()), 8)) END
    FROM store AS s);

-- How often a device has said hello, and which session did last: a session ends for a larger number only. fillfactor
-- leaves room for in-page updates.
CREATE TABLE device_session (
    user_id text COLLATE "C" NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    session_id uuid NOT NULL,
    gateway text NOT NULL,
    opened_at timestamptz NOT NULL,
    PRIMARY KEY (user_id, device_id)
) WITH (fillfactor = 50);

-- Tokens that are void: the one with this jti; else those of the user, of one device if it is named, that were issued
-- before a time. Nobody knows how long a token may live, so a row stays unless it says that all that it voids have ended
-- by then.
CREATE TABLE revocation (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    user_id text COLLATE "C" NOT NULL,
    device_id text COLLATE "C",
    jti text COLLATE "C",
    before timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz
);
CREATE INDEX revocation_by_user ON revocation (user_id);
-- Ids are drawn before they are committed: whoever looks for new rows looks back over a while, by time.
CREATE INDEX revocation_by_time ON revocation (created_at);
CREATE INDEX revocation_by_end ON revocation (expires_at) WHERE expires_at IS NOT NULL;

-- Counts the hellos of devices, all of a batch in one statement. The arrays run in parallel, one element per hello in the
-- order of arrival; several of one device get rising numbers. p_issued (seconds since the epoch) and p_jtis: of the token
-- that each came with, or null. One whose token is void gets no number, so that it replaces nobody. The rule without SQL
-- is services/gateway/revocations.py.
--
-- Rows are taken in the order of their keys, the same for every gateway.
CREATE FUNCTION open_sessions(
    p_users text[], p_devices text[], p_session_ids uuid[], p_gateway text, p_issued float8[], p_jtis text[]
) RETURNS TABLE (ord bigint, number bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp
SET enable_hashjoin = on
AS $$
    WITH hello AS (
        SELECT i.*, count(*) OVER w AS hellos, row_number() OVER (w ORDER BY i.ord) AS nth
        FROM unnest(p_users, p_devices, p_session_ids, p_issued, p_jtis)
            WITH ORDINALITY AS i (user_id, device_id, session_id, issued, jti, ord)
        WHERE NOT EXISTS (
            SELECT FROM revocation AS r
            WHERE r.user_id = i.user_id
              AND CASE WHEN r.jti IS NOT NULL THEN r.jti = i.jti
                       ELSE coalesce(r.device_id = i.device_id, true)
                            AND coalesce(i.issued < extract(epoch FROM r.before)::float8, true) END)
        WINDOW w AS (PARTITION BY i.user_id, i.device_id)
    ), opened AS (
        INSERT INTO device_session AS d (user_id, device_id, number, session_id, gateway, opened_at)
        SELECT h.user_id, h.device_id, h.hellos, h.session_id, p_gateway, clock_timestamp()
        FROM hello AS h
        WHERE h.nth = h.hellos
        ORDER BY h.user_id COLLATE "C", h.device_id COLLATE "C"
        ON CONFLICT (user_id, device_id) DO UPDATE
        SET number = d.number + excluded.number, session_id = excluded.session_id, gateway = excluded.gateway,
            opened_at = excluded.opened_at
        RETURNING d.user_id, d.device_id, d.number
    )
    SELECT h.ord, o.number - h.hellos + h.nth
    FROM hello AS h
    JOIN opened AS o ON o.user_id = h.user_id AND o.device_id = h.device_id
$$;

-- Forgets revocations that void nothing any more; how many.
CREATE FUNCTION forget_revocations() RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms'
AS $$
    WITH gone AS (
        DELETE FROM revocation WHERE expires_at < statement_timestamp() RETURNING id
    )
    SELECT count(*) FROM gone
$$;

-- Every accepted and every refused change of state, with its cause; appended, never changed. kind: what happened; cause:
-- why; service: who says so. A row may tell of a range of a conversation's timeline, from_seq to to_seq.
CREATE TABLE transition (
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    from_seq bigint,
    to_seq bigint,
    conversation_id uuid,
    session_id uuid,
    service text NOT NULL,
    kind text NOT NULL,
    cause text NOT NULL,
    user_id text COLLATE "C",
    device_id text COLLATE "C",
    trace_id text,
    detail json
) PARTITION BY RANGE (at);

-- Takes what no day has a partition for, so that no insert fails.
CREATE TABLE transition_default PARTITION OF transition DEFAULT;

-- The days [low, high) that have a partition.
CREATE FUNCTION transition_partitions() RETURNS TABLE (name name, low timestamptz, high timestamptz)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT c.relname, b.bounds[1]::timestamptz, b.bounds[2]::timestamptz
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL (
        SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''([^'']+)''\) TO \(''([^'']+)''\)') AS bounds
    ) AS b
    WHERE i.inhparent = 'transition'::regclass AND b.bounds IS NOT NULL;
END;

-- Makes what is missing of today's partition and so many days ahead; how many were made. A day that began in the default
-- partition stays there: its rows would have to be moved while others wait.
CREATE FUNCTION make_transition_partitions(p_ahead int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' SET timezone = 'UTC' AS $$
DECLARE
    v_made int := 0;
    v_day date;
    v_name text;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    FOR v_day IN
        SELECT d.day
        FROM (SELECT current_date + n AS day FROM generate_series(0, p_ahead) AS n) AS d
        WHERE NOT EXISTS (SELECT FROM transition_partitions() AS p WHERE d.day >= p.low AND d.day < p.high)
        ORDER BY d.day
    LOOP
        CONTINUE WHEN EXISTS (SELECT FROM transition_default AS t WHERE t.at >= v_day AND t.at < v_day + 1);
        v_name := 'transition_p' || to_char(v_day, 'YYYYMMDD');
        EXECUTE format('CREATE TABLE %I (LIKE transition INCLUDING ALL)', v_name);
        EXECUTE format('ALTER TABLE transition ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', v_name, v_day, v_day + 1);
        v_made := v_made + 1;
    END LOOP;
    RETURN v_made;
END $$;

-- Drops the oldest day if it ended before p_retention, and what is as old in the default partition; whether it did.
CREATE FUNCTION drop_transition_partition(p_retention interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' SET timezone = 'UTC' AS $$
DECLARE
    v_before timestamptz := clock_timestamp() - p_retention;
    v_name name;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    DELETE FROM transition_default WHERE at < v_before;
    SELECT p.name INTO v_name FROM transition_partitions() AS p WHERE p.high <= v_before ORDER BY p.low LIMIT 1;
    IF v_name IS NULL THEN
        RETURN false;
    END IF;
    LOCK TABLE ONLY transition IN ACCESS EXCLUSIVE MODE;
    -- Everybody else waits by now: a partition that somebody reads is left for the next time.
    PERFORM set_config('lock_timeout', '10ms', true);
    EXECUTE format('DROP TABLE %I', v_name);
    RETURN true;
END $$;

SELECT make_transition_partitions(14);

REVOKE EXECUTE ON FUNCTION open_sessions, forget_revocations, make_transition_partitions, drop_transition_partition
FROM PUBLIC;
GRANT EXECUTE ON FUNCTION open_sessions TO waybill_gateway;
GRANT EXECUTE ON FUNCTION make_transition_partitions, drop_transition_partition, forget_revocations TO waybill_relay;

GRANT SELECT ON device_session, revocation, outbox TO waybill_gateway;
GRANT SELECT ON SEQUENCE outbox_id_seq TO waybill_gateway;
GRANT INSERT ON transition TO waybill_gateway, waybill_receipts, waybill_ingest, waybill_relay;
GRANT SELECT ON device_session, revocation, transition TO waybill_console;
GRANT INSERT (user_id, device_id, jti, before, reason, expires_at) ON revocation TO waybill_console;

-- The gateway writes now, too.
ALTER ROLE waybill_gateway SET statement_timeout = '8s';
ALTER ROLE waybill_gateway SET lock_timeout = '3s';
ALTER ROLE waybill_gateway SET transaction_timeout = '8s';
ALTER ROLE waybill_gateway SET idle_in_transaction_session_timeout = '3s';
ALTER ROLE waybill_gateway SET tcp_user_timeout = '5s';
-- All its reads are by key, for arrays of any length, or in the order of an index up to a limit. A plan lives as long as
-- a connection: one made while a table was small, or for a short array, would scan it for ever.
ALTER ROLE waybill_gateway SET plan_cache_mode = force_generic_plan;
ALTER ROLE waybill_gateway SET enable_seqscan = off;
ALTER ROLE waybill_gateway SET enable_hashjoin = off;
ALTER ROLE waybill_gateway SET enable_mergejoin = off;
ALTER ROLE waybill_gateway SET enable_sort = off;
ALTER ROLE waybill_gateway SET enable_bitmapscan = off;
ALTER ROLE waybill_gateway SET jit = off;

-- migrate:down
