-- migrate:up transaction:false

-- Each part is a transaction of its own and may be run again: no lock of one part is held during another.

-- dead_letter takes records that a consumer read from a topic and could not process. origin: the topic, named as in the
-- outbox; origin_*: where the record was read. Its conversation is known where its key is a UUID, its event where its
-- headers name one. cut_from: how many bytes the value had, where only its beginning is kept.
BEGIN;
SELECT alter_patiently('dead_letter', $alter$
    ALTER TABLE dead_letter
        ALTER COLUMN conversation_id DROP NOT NULL,
        ALTER COLUMN event_id DROP NOT NULL,
        ADD COLUMN IF NOT EXISTS origin_cluster text,
        ADD COLUMN IF NOT EXISTS origin_partition int,
        ADD COLUMN IF NOT EXISTS origin_offset bigint,
        ADD COLUMN IF NOT EXISTS record_key bytea,
        ADD COLUMN IF NOT EXISTS cut_from int,
        DROP CONSTRAINT IF EXISTS dead_letter_of_outbox,
        ADD CONSTRAINT dead_letter_of_outbox
            CHECK (origin <> 'outbox' OR (conversation_id IS NOT NULL AND event_id IS NOT NULL)) NOT VALID;
$alter$);
COMMIT;

BEGIN;
ALTER TABLE dead_letter VALIDATE CONSTRAINT dead_letter_of_outbox;
COMMIT;

-- A record has one letter, however often and by however many it is read.
BEGIN;
CREATE UNIQUE INDEX IF NOT EXISTS dead_letter_by_record
    ON dead_letter (origin, origin_cluster, origin_partition, origin_offset) WHERE origin <> 'outbox';
COMMIT;

-- Consumers and relays look for their own, however many of the others' wait.
BEGIN;
CREATE INDEX IF NOT EXISTS dead_letter_to_read
    ON dead_letter (origin, origin_partition, origin_cluster, origin_offset) WHERE state = 'retrying' AND origin <> 'outbox';
CREATE INDEX IF NOT EXISTS dead_letter_to_publish
    ON dead_letter (died_at, dead_id) WHERE state = 'retrying' AND origin = 'outbox';
COMMIT;

BEGIN;
SELECT alter_patiently('dead_letter', $alter$
    DROP INDEX IF EXISTS dead_letter_retrying;
$alter$);
COMMIT;

BEGIN;

-- Every attempt to process a record of such a letter, the first one too; error is null for the one that succeeded.
CREATE TABLE IF NOT EXISTS dead_letter_attempt (
    dead_id bigint NOT NULL,
    attempt int NOT NULL CHECK (attempt > 0),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    error text,
    service text NOT NULL,
    PRIMARY KEY (dead_id, attempt)
);

-- Who tries the letters of an origin again: one process at a time, so that they are tried in order.
CREATE TABLE IF NOT EXISTS letter_lease (
    origin text PRIMARY KEY,
    owner text NOT NULL,
    lease_until timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Whether somebody would try a letter of this origin again: the relay, or a consumer that looks for them. A gateway does
-- not: what it pushes, it reads from what the relay publishes.
CREATE OR REPLACE FUNCTION can_retry_letter(p_origin text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_origin IN ('outbox', 'acks.v1');

-- The first value of a header in a list of names and values in turn; null if there is none.
CREATE OR REPLACE FUNCTION letter_header(p_headers text[], p_name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT p_headers[n + 1] FROM generate_subscripts(p_headers, 1) AS n
    WHERE n % 2 = 1 AND p_headers[n] = p_name
    ORDER BY n LIMIT 1;
END;

-- The word before an error's first colon, for the log: never what the record holds.
CREATE OR REPLACE FUNCTION error_class(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(substring(p_error FROM '^([A-Za-z0-9_.]{1,40}):'), 'unreadable');

-- Makes letters of records that a consumer (p_service) could not process; those that have one already keep it as it is.
-- Arrays run in parallel, one element per record. p_headers: of each a JSON array of pairs [name, text or null], or null.
-- What is kept of a record is bounded: 128 KiB of its value, 1 KiB of its key, 1,000 characters of its error and of each of
-- its first 32 headers' names and values. Returns how many letters are new.
--
-- Nothing that a record holds may make this fail: its consumer could not go on. Rows go in in one order, the same for all
-- who read the same records.
CREATE OR REPLACE FUNCTION keep_records(
    p_service text, p_origin text, p_cluster text, p_partitions int[], p_offsets bigint[], p_keys bytea[], p_values bytea[],
    p_headers json[], p_errors text[]
) RETURNS int
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    v_new int;
BEGIN
    WITH given AS (
        SELECT r.partition, r.at, r.key, r.value, coalesce(left(r.error, 1000), 'unreadable') AS error, h.headers,
               CASE WHEN octet_length(r.key) = 36 THEN encode(r.key, 'escape') END AS key_text,
               letter_header(h.headers, 'ce_id') AS ce_id,
               letter_header(h.headers, 'traceparent') AS traceparent,
               CASE WHEN p_origin = 'events.v1' THEN letter_header(h.headers, 'seq') END AS seq
        FROM unnest(p_partitions, p_offsets, p_keys, p_values, p_headers, p_errors)
            AS r (partition, at, key, value, headers, error)
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(left(p.text, 1000) ORDER BY e.place, p.nth), '{}') AS headers
            FROM json_array_elements(
                CASE WHEN json_typeof(r.headers) = 'array'
                     THEN replace(r.headers::text, '\u0000', '\ufffd')::json END) WITH ORDINALITY AS e (pair, place)
            CROSS JOIN LATERAL (VALUES (1, e.pair ->> 0), (2, e.pair ->> 1)) AS p (nth, text)
            WHERE e.place <= 32
        ) AS h
    ), made AS (
        INSERT INTO dead_letter (
            origin, shard, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at, state, attempts,
            error, passed, origin_cluster, origin_partition, origin_offset, record_key, cut_from)
        SELECT p_origin, g.partition % 64,
               CASE WHEN g.key_text ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN g.key_text::uuid END,
               CASE WHEN g.seq ~ '^[0-9]{1,18}$' THEN g.seq::bigint END,
               CASE WHEN g.ce_id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN g.ce_id::uuid END,
               p_origin, coalesce(letter_header(g.headers, 'ce_type'), ''),
               coalesce(letter_header(g.headers, 'ce_source'), ''), g.headers,
               substring(coalesce(g.value, '') FROM 1 FOR 131072), clock_timestamp(), 'dead', 1, g.error,
               -- The relay, which looks for what has passed which letter, has no part in it.
               true, p_cluster, g.partition, g.at, substring(g.key FROM 1 FOR 1024),
               CASE WHEN octet_length(g.value) > 131072 THEN octet_length(g.value) END
        FROM given AS g
        ORDER BY g.partition, g.at
        ON CONFLICT (origin, origin_cluster, origin_partition, origin_offset) WHERE origin <> 'outbox' DO NOTHING
        RETURNING dead_id, died_at, seq, conversation_id, error, headers, origin_partition, origin_offset
    ), tried AS (
        INSERT INTO dead_letter_attempt (dead_id, attempt, at, error, service)
        SELECT m.dead_id, 1, m.died_at, m.error, p_service FROM made AS m
    ), told AS (
        INSERT INTO transition (at, from_seq, to_seq, conversation_id, service, kind, cause, trace_id, detail)
        SELECT m.died_at, m.seq, m.seq, m.conversation_id, p_service, 'dead', error_class(m.error),
               substring(letter_header(m.headers, 'traceparent') FROM '^[0-9a-f]{2}-([0-9a-f]{32})-'),
               json_build_object('dead_id', m.dead_id, 'topic', p_origin, 'partition', m.origin_partition,
                   'offset', m.origin_offset)
        FROM made AS m
    )
    SELECT count(*) INTO v_new FROM made;
    RETURN v_new;
END $$;

-- As keep_records, for the receipts service.
CREATE OR REPLACE FUNCTION bury_records(
    p_origin text, p_cluster text, p_partitions int[], p_offsets bigint[], p_keys bytea[], p_values bytea[], p_headers json[],
    p_errors text[]
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF p_origin = 'outbox' THEN
        RAISE EXCEPTION 'the letters of the outbox are the relay''s';
    END IF;
    RETURN keep_records('receipts', p_origin, p_cluster, p_partitions, p_offsets, p_keys, p_values, p_headers, p_errors);
END $$;

-- As keep_records, for gateways, which all read the same two topics.
CREATE OR REPLACE FUNCTION bury_stream_records(
    p_origin text, p_cluster text, p_partitions int[], p_offsets bigint[], p_keys bytea[], p_values bytea[], p_headers json[],
    p_errors text[]
) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF p_origin NOT IN ('events.v1', 'receipts.v1') THEN
        RAISE EXCEPTION 'no gateway reads %', p_origin;
    END IF;
    RETURN keep_records('gateway', p_origin, p_cluster, p_partitions, p_offsets, p_keys, p_values, p_headers, p_errors);
END $$;

-- The letters of an origin that somebody asked to try again, in the order of partition and offset, for whoever holds the
-- origin's lease: p_owner gets it for p_lease if it is free. Nothing is written while there is nothing to do.
CREATE OR REPLACE FUNCTION claim_letters(p_origin text, p_owner text, p_lease interval, p_most int)
RETURNS TABLE (dead_id bigint, attempts int, partition int, at bigint, key bytea, value bytea, is_cut boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF NOT EXISTS (
        SELECT FROM dead_letter AS d WHERE d.origin = p_origin AND d.origin <> 'outbox' AND d.state = 'retrying')
    THEN
        RETURN;
    END IF;
    INSERT INTO letter_lease AS l (origin, owner, lease_until) VALUES (p_origin, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT (origin) DO UPDATE SET owner = excluded.owner, lease_until = excluded.lease_until
    WHERE l.owner = excluded.owner OR l.lease_until < clock_timestamp();
    IF NOT FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT d.dead_id, d.attempts, d.origin_partition, d.origin_offset, d.record_key, d.payload, d.cut_from IS NOT NULL
        FROM dead_letter AS d
        WHERE d.origin = p_origin AND d.origin <> 'outbox' AND d.state = 'retrying'
        ORDER BY d.origin_partition, d.origin_cluster, d.origin_offset
        LIMIT p_most;
END $$;

-- Writes down what became of a claimed letter: 'sent' if p_error is null, else dead again. p_attempts: how often it had been
-- tried before, so that what is told twice counts once. The lease lasts for p_lease from now on. False if it is not
-- p_owner's to say.
CREATE OR REPLACE FUNCTION settle_claimed(
    p_service text, p_origin text, p_owner text, p_lease interval, p_dead_id bigint, p_attempts int, p_error text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_letter dead_letter;
BEGIN
    UPDATE letter_lease SET lease_until = clock_timestamp() + p_lease WHERE origin = p_origin AND owner = p_owner;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE dead_letter AS d
    SET state = CASE WHEN p_error IS NULL THEN 'sent' ELSE 'dead' END,
        attempts = d.attempts + 1,
        error = coalesce(left(p_error, 1000), d.error),
        settled_at = CASE WHEN p_error IS NULL THEN clock_timestamp() END
    WHERE d.dead_id = p_dead_id AND d.origin = p_origin AND d.origin <> 'outbox' AND d.state = 'retrying'
        AND d.attempts = p_attempts
    RETURNING * INTO v_letter;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO dead_letter_attempt (dead_id, attempt, error, service)
    VALUES (p_dead_id, v_letter.attempts, left(p_error, 1000), p_service);
    INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, detail)
    VALUES (v_letter.seq, v_letter.seq, v_letter.conversation_id, p_service, 'retried',
            CASE WHEN p_error IS NULL THEN 'applied' ELSE 'refused:' || error_class(p_error) END,
            json_build_object('dead_id', p_dead_id, 'attempt', v_letter.attempts));
    RETURN true;
END $$;

-- As before, and whatever a consumer would try again, under the same cap.
CREATE OR REPLACE FUNCTION redrive_letters(p_since timestamptz, p_cap int, p_who text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('waybill redrive'));
    WITH picked AS (
        SELECT dead_id FROM dead_letter
        WHERE state = 'dead' AND can_retry_letter(origin) AND died_at < p_since
            AND (redriven_at IS NULL OR redriven_at < p_since)
        ORDER BY died_at, dead_id
        LIMIT greatest(0, p_cap - (SELECT count(*) FROM dead_letter WHERE redriven_at >= p_since))
    ), locked AS (
        SELECT d.dead_id FROM dead_letter AS d JOIN picked ON picked.dead_id = d.dead_id
        WHERE d.state = 'dead'
        ORDER BY d.dead_id
        FOR UPDATE OF d
    ), asked AS (
        UPDATE dead_letter AS d SET state = 'retrying', redriven_at = clock_timestamp()
        FROM locked WHERE d.dead_id = locked.dead_id
        RETURNING d.dead_id
    )
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'redrive', p_who FROM asked;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- As before, with the attempts of a consumer's letter.
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
    ), tries AS (
        DELETE FROM dead_letter_attempt AS a USING gone WHERE a.dead_id = gone.dead_id
    ), attempts AS (
        DELETE FROM outbox_attempt AS a USING gone
        WHERE a.shard = gone.shard AND a.id = gone.outbox_id
            AND NOT EXISTS (SELECT FROM outbox_parked AS p WHERE p.shard = gone.shard AND p.id = gone.outbox_id)
    )
    SELECT g.dead_id, g.state, g.event_id, g.conversation_id, g.topic, g.error, g.died_at FROM gone AS g;
END $$;

REVOKE EXECUTE ON FUNCTION keep_records, bury_records, bury_stream_records, claim_letters, settle_claimed FROM PUBLIC;
GRANT EXECUTE ON FUNCTION bury_records, claim_letters, settle_claimed TO waybill_receipts;
GRANT EXECUTE ON FUNCTION bury_stream_records TO waybill_gateway;
GRANT SELECT ON dead_letter_attempt TO waybill_console;

COMMIT;

-- migrate:down
