-- migrate:up transaction:false

-- Each part is a transaction of its own and may be run again: no lock of one part is held during another.
BEGIN;

-- How wide a row of the log is, in classes: 0 tells of one seq, 1 of up to 16, 2 of up to 256, 3 of up to 4,096, 4 of more;
-- null of none. Rows of a class that reach to a seq begin near it, so that each class is one short look.
CREATE OR REPLACE FUNCTION transition_width(from_seq bigint, to_seq bigint) RETURNS smallint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN to_seq = from_seq THEN 0::smallint
    WHEN abs(to_seq - from_seq) < 16 THEN 1::smallint
    WHEN abs(to_seq - from_seq) < 256 THEN 2::smallint
    WHEN abs(to_seq - from_seq) < 4096 THEN 3::smallint
    WHEN to_seq IS NOT NULL AND from_seq IS NOT NULL THEN 4::smallint
END;

-- The days [low, high) that have a partition. As before, but that nothing of another table's partitions is ever taken for a
-- time: whoever asked for some days only had their bounds looked at, too, whenever the planner thought that cheaper.
CREATE OR REPLACE FUNCTION transition_partitions() RETURNS TABLE (name name, low timestamptz, high timestamptz)
LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH part AS MATERIALIZED (
        SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) AS bound
        FROM pg_inherits AS i
        JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'transition'::regclass
    )
    SELECT p.relname, b.bounds[1]::timestamptz, b.bounds[2]::timestamptz
    FROM part AS p
    CROSS JOIN LATERAL (
        SELECT regexp_match(p.bound, 'FROM \(''(\d{4}-[^'']+)''\) TO \(''(\d{4}-[^'']+)''\)') AS bounds
    ) AS b
    WHERE b.bounds IS NOT NULL;  -- null: the default, or it has been dropped since our snapshot
END;
COMMIT;

-- By conversation and seq; and what is of no conversation, sessions above all, by user. The parent's indexes are made for
-- themselves first. New days get theirs when they are made.
BEGIN;
SELECT alter_patiently('transition', $alter$
    CREATE INDEX IF NOT EXISTS transition_by_seq
        ON ONLY transition (conversation_id, transition_width(from_seq, to_seq), from_seq)
        WHERE conversation_id IS NOT NULL;
    CREATE INDEX IF NOT EXISTS transition_by_user
        ON ONLY transition (user_id, at) WHERE conversation_id IS NULL AND user_id IS NOT NULL;
$alter$);
COMMIT;

-- Gives a partition its indexes, if it lacks them; false if its lock is not to be had now.
BEGIN;
CREATE OR REPLACE FUNCTION index_transition_partition(p_name name) RETURNS boolean
LANGUAGE plpgsql SET search_path = public, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    v_parent text;
    v_name text;
BEGIN
    FOREACH v_parent IN ARRAY ARRAY['transition_by_seq', 'transition_by_user'] LOOP
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_inherits AS i JOIN pg_index AS x ON x.indexrelid = i.inhrelid
            WHERE i.inhparent = v_parent::regclass AND x.indrelid = p_name::text::regclass);
        v_name := p_name || CASE v_parent WHEN 'transition_by_seq' THEN '_by_seq' ELSE '_by_user' END;
        EXECUTE format('CREATE INDEX %I ON %I %s', v_name, p_name, CASE v_parent
            WHEN 'transition_by_seq' THEN
                '(conversation_id, transition_width(from_seq, to_seq), from_seq) WHERE conversation_id IS NOT NULL'
            ELSE '(user_id, at) WHERE conversation_id IS NULL AND user_id IS NOT NULL' END);
        EXECUTE format('ALTER INDEX %I ATTACH PARTITION %I', v_parent, v_name);
    END LOOP;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
COMMIT;

-- Days that are not written to yet, then those that are over, each by itself.
BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        EXIT WHEN (
            SELECT bool_and(index_transition_partition(p.name)) FROM transition_partitions() AS p
            WHERE p.low > clock_timestamp());
        PERFORM pg_sleep(0.2 * random());
    END LOOP;
END $$;
COMMIT;

BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        EXIT WHEN (
            SELECT bool_and(index_transition_partition(p.name)) FROM transition_partitions() AS p
            WHERE p.high <= clock_timestamp());
        PERFORM pg_sleep(0.2 * random());
    END LOOP;
END $$;
COMMIT;

-- Today's, and what has no day. Writers wait while these are indexed: what was logged before this version was rare, some
-- cursors and sessions, so that it is a matter of milliseconds.
BEGIN;
DO $$
BEGIN
    FOR try IN 1..100 LOOP
        IF (SELECT bool_and(index_transition_partition(p.name))
            FROM (SELECT name FROM transition_partitions() UNION ALL SELECT 'transition_default') AS p)
        THEN
            RETURN;
        END IF;
        PERFORM pg_sleep(0.2 * random());
    END LOOP;
    RAISE lock_not_available USING MESSAGE = 'a day of transition is locked by somebody for long: migrate again later';
END $$;
DROP FUNCTION index_transition_partition;
COMMIT;

BEGIN;

-- Rows of the log that tell of a conversation's seqs from p_low to p_high, logged at p_since or later: the day of the
-- event, so that no other one is looked at. A row may name its seqs in either order (a cursor, and where it should be).
CREATE OR REPLACE FUNCTION transitions_around(p_conversation uuid, p_low bigint, p_high bigint, p_since timestamptz)
RETURNS SETOF transition
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT t.*
    FROM (VALUES (0::smallint, 0::bigint), (1::smallint, 15), (2::smallint, 255), (3::smallint, 4095)) AS w (class, reach)
    JOIN transition AS t ON t.conversation_id = p_conversation AND transition_width(t.from_seq, t.to_seq) = w.class
        AND t.from_seq >= p_low - w.reach AND t.from_seq <= p_high + w.reach
    WHERE greatest(t.from_seq, t.to_seq) >= p_low AND least(t.from_seq, t.to_seq) <= p_high AND t.at >= p_since
    UNION ALL
    SELECT t.*
    FROM transition AS t
    WHERE t.conversation_id = p_conversation AND transition_width(t.from_seq, t.to_seq) = 4::smallint
        AND greatest(t.from_seq, t.to_seq) >= p_low AND least(t.from_seq, t.to_seq) <= p_high AND t.at >= p_since;
END;

-- How far the log has what became of the rows of each shard. cursor_id: rows up to it are logged as published, or are
-- parked, whose log is their own; sent_id: as sent. A rewind takes back the first alone: what is published again is logged
-- again, what was sent was sent once. It begins where the relay's cursor is now.
CREATE TABLE IF NOT EXISTS outbox_journal (
    shard smallint PRIMARY KEY CHECK (shard BETWEEN 0 AND 63),
    cursor_id bigint NOT NULL,
    sent_id bigint NOT NULL
) WITH (fillfactor = 50);
INSERT INTO outbox_journal SELECT shard, cursor_id, cursor_id FROM outbox_shard ON CONFLICT DO NOTHING;

-- Logs what was sent and published of these shards, at most p_most rows of the outbox, and at most 500 of one shard; the
-- caller has locked their rows of outbox_journal. Returns how many rows were read, and whether there are more.
--
-- Sends of one user, device and trace into one conversation within a second are one row as long as their seqs go on, and so
-- is what one delivery brought of a conversation: `offset` is the first one's, `offsets` all of them where others lie
-- between. A row's offset is the delivery's first one plus its rank there, parked rows counted out (outbox_state). A topic's
-- rows have all a seq, or none: those of receipts have none and are passed over.
CREATE OR REPLACE FUNCTION write_journal(p_shards smallint[], p_most int) RETURNS TABLE (read bigint, more boolean)
LANGUAGE plpgsql SET search_path = public, pg_temp
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = on
AS $$
DECLARE
    v_shards smallint[];
    v_after bigint[];
    v_sent bigint[];
    v_upto bigint[];
    v_low bigint;
    v_high bigint;
    v_each int;
BEGIN
    SELECT array_agg(j.shard), array_agg(j.cursor_id), array_agg(j.sent_id), array_agg(s.cursor_id), min(j.cursor_id),
           max(s.cursor_id), greatest(1, least(500, p_most / count(*)::int))
    INTO v_shards, v_after, v_sent, v_upto, v_low, v_high, v_each
    FROM outbox_journal AS j
    JOIN outbox_shard AS s ON s.shard = j.shard
    WHERE j.shard = ANY (p_shards) AND j.cursor_id < s.cursor_id
    HAVING count(*) > 0;
    IF v_shards IS NULL THEN
        RETURN QUERY SELECT 0::bigint, false;
        RETURN;
    END IF;

    RETURN QUERY
    WITH part AS MATERIALIZED (
        SELECT p.shard, p.after, p.sent_id, o.*
        FROM unnest(v_shards, v_after, v_sent, v_upto) AS p (shard, after, sent_id, upto)
        CROSS JOIN LATERAL (
            SELECT n.id, n.conversation_id, n.seq, n.topic, n.headers, n.device_id, n.created_at
            FROM outbox AS n
            -- The bounds of all shards prune partitions once, in place of once for each.
            WHERE n.shard = p.shard AND n.id > p.after AND n.id <= p.upto AND n.id > v_low AND n.id <= v_high
            ORDER BY n.id
            LIMIT v_each
        ) AS o
    ), sends AS (
        SELECT r.conversation_id, r.seq, r.created_at, r.device_id, e.sender_id, date_trunc('second', r.created_at) AS second,
               nullif(split_part(r.headers[array_position(r.headers, 'traceparent') + 1], '-', 2), '') AS trace_id
        FROM part AS r
        -- Each by its key, whatever the planner thinks of how many there are.
        CROSS JOIN LATERAL (
            SELECT n.sender_id FROM event AS n WHERE n.conversation_id = r.conversation_id AND n.seq = r.seq LIMIT 1
        ) AS e
        WHERE r.id > r.sent_id
    ), sent AS (
        INSERT INTO transition (
            at, from_seq, to_seq, conversation_id, service, kind, cause, user_id, device_id, trace_id)
        SELECT min(s.created_at), min(s.seq), max(s.seq), s.conversation_id, 'ingest', 'sent', 'new', s.sender_id, s.device_id,
               s.trace_id
        FROM (
            SELECT n.*, n.seq - row_number() OVER (
                PARTITION BY n.conversation_id, n.sender_id, n.device_id, n.trace_id, n.second ORDER BY n.seq) AS island
            FROM sends AS n
        ) AS s
        GROUP BY s.conversation_id, s.sender_id, s.device_id, s.trace_id, s.second, s.island
    ), ends AS (
        SELECT r.shard, r.topic, r.after, max(r.id) AS last FROM part AS r WHERE r.seq IS NOT NULL GROUP BY 1, 2, 3
    ), delivered AS (
        -- A row stands in the first delivery that ends behind it. begins: behind the rows that stand in an earlier one, or
        -- that an earlier call has read.
        SELECT e.shard, e.after, d.*, greatest(
                   e.after, lag(d.to_id) OVER (PARTITION BY e.shard, d.topic ORDER BY d.to_id)) AS begins
        FROM ends AS e
        CROSS JOIN LATERAL (
            (SELECT n.from_id, n.to_id, n.topic, n.partition, n.base_offset, n.epoch, n.acked_at
             FROM outbox_delivery AS n
             WHERE n.shard = e.shard AND n.topic = e.topic AND n.to_id > e.after AND n.to_id < e.last
                 AND n.to_id > v_low AND n.to_id <= v_high)
            UNION ALL
            (SELECT n.from_id, n.to_id, n.topic, n.partition, n.base_offset, n.epoch, n.acked_at
             FROM outbox_delivery AS n
             WHERE n.shard = e.shard AND n.topic = e.topic AND n.to_id >= e.last AND n.to_id > v_low AND n.to_id <= v_high
             ORDER BY n.to_id
             LIMIT 1)
        ) AS d
    ), counted AS MATERIALIZED (
        SELECT d.*, CASE WHEN d.from_id > d.begins THEN 0 ELSE
                   (SELECT count(*) FROM outbox AS o
                    -- It may have begun any number of partitions before, after a long outage.
                    WHERE o.shard = d.shard AND o.id >= d.from_id AND o.id <= d.begins AND o.topic = d.topic
                        AND o.id <= v_high)
                   - (SELECT count(*) FROM outbox_parked AS p
                      WHERE p.shard = d.shard AND p.id >= d.from_id AND p.id <= d.begins AND p.topic = d.topic) END AS before
        FROM delivered AS d
    ), placed AS (
        SELECT d.shard, d.topic, d.to_id, d.partition, d.epoch, d.acked_at, r.conversation_id, r.seq,
               d.base_offset + d.before + row_number() OVER (PARTITION BY d.shard, d.topic, d.to_id ORDER BY r.id) - 1
                   AS kafka_offset,
               r.seq - row_number() OVER (PARTITION BY d.shard, d.topic, d.to_id, r.conversation_id ORDER BY r.seq) AS island
        FROM part AS r
        JOIN counted AS d ON d.shard = r.shard AND d.topic = r.topic
        WHERE r.seq IS NOT NULL AND r.id >= d.from_id AND r.id > d.begins AND r.id <= d.to_id
            AND NOT EXISTS (SELECT FROM outbox_parked AS p WHERE p.shard = r.shard AND p.id = r.id LIMIT 1)
    ), published AS (
        INSERT INTO transition (at, from_seq, to_seq, conversation_id, service, kind, cause, detail)
        SELECT p.acked_at, min(p.seq), max(p.seq), p.conversation_id, 'relay', 'published', 'new',
               CASE WHEN max(p.kafka_offset) - min(p.kafka_offset) = count(*) - 1
                    THEN json_build_object(
                        'topic', p.topic, 'partition', p.partition, 'offset', min(p.kafka_offset), 'epoch', p.epoch)
                    ELSE json_build_object(
                        'topic', p.topic, 'partition', p.partition, 'offset', min(p.kafka_offset), 'epoch', p.epoch,
                        'offsets', array_agg(p.kafka_offset ORDER BY p.seq)) END
        FROM placed AS p
        GROUP BY p.shard, p.topic, p.to_id, p.conversation_id, p.island, p.partition, p.epoch, p.acked_at
    ), reached AS (
        SELECT p.shard, p.upto, coalesce(r.rows, 0) AS rows, CASE WHEN r.rows = v_each THEN r.id ELSE p.upto END AS id
        FROM unnest(v_shards, v_upto) AS p (shard, upto)
        LEFT JOIN (SELECT n.shard, count(*) AS rows, max(n.id) AS id FROM part AS n GROUP BY n.shard) AS r
            ON r.shard = p.shard
    ), moved AS (
        UPDATE outbox_journal AS j SET cursor_id = r.id, sent_id = greatest(j.sent_id, r.id)
        FROM reached AS r WHERE j.shard = r.shard
    )
    SELECT sum(r.rows)::bigint, bool_or(r.id < r.upto) FROM reached AS r;
END $$;

-- The same of the shards that p_owner holds with these epochs, as far as nobody else is at it: the relay's loop calls it
-- until there is no more. What is logged and the journal's cursors are one transaction, so that nothing is logged twice,
-- and nothing passed over, whoever dies when; the owner and epoch only share the work out.
CREATE OR REPLACE FUNCTION journal_outbox(p_owner text, p_shards smallint[], p_epochs bigint[], p_most int)
RETURNS TABLE (read bigint, more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_shards smallint[];
BEGIN
    SELECT array_agg(l.shard) INTO v_shards
    FROM (
        SELECT j.shard
        FROM unnest(p_shards, p_epochs) AS m (shard, epoch)
        JOIN outbox_shard AS s ON s.shard = m.shard AND s.owner = p_owner AND s.epoch = m.epoch
        JOIN outbox_journal AS j ON j.shard = m.shard AND j.cursor_id < s.cursor_id
        ORDER BY j.shard
        FOR UPDATE OF j SKIP LOCKED
    ) AS l;
    RETURN QUERY SELECT w.read, w.more FROM write_journal(coalesce(v_shards, '{}'), p_most) AS w;
END $$;

-- Lets the journal pass over what is about to be dropped with the oldest partition of the outbox, so that it keeps nothing
-- there: the partition is past p_retention, and the log was switched off, or far behind. Returns how many rows of events it
-- passed over, counted up to 100,000 of each shard, and notes them in the log.
CREATE OR REPLACE FUNCTION skip_journal(p_retention interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '100ms' AS $$
DECLARE
    v_low bigint;
    v_high bigint;
    v_skipped bigint;
BEGIN
    IF NOT try_outbox_retention() THEN
        RETURN NULL;
    END IF;
    SELECT p.low, p.high INTO v_low, v_high FROM outbox_partitions('outbox') AS p ORDER BY p.low LIMIT 1;
    IF v_high IS NULL OR v_high > next_outbox_id()
        OR outbox_partition_is_needed(v_low, v_high, clock_timestamp() - p_retention) IS NOT NULL
    THEN
        RETURN 0;
    END IF;
    WITH behind AS (
        SELECT j.shard, j.cursor_id FROM outbox_journal AS j WHERE j.cursor_id < v_high - 1 ORDER BY j.shard FOR UPDATE
    ), missing AS (
        SELECT b.shard, b.cursor_id, (
            SELECT count(*)
            FROM (
                SELECT FROM outbox AS o
                WHERE o.shard = b.shard AND o.id > b.cursor_id AND o.id < v_high AND o.seq IS NOT NULL
                LIMIT 100000
            ) AS counted) AS rows
        FROM behind AS b
    ), moved AS (
        UPDATE outbox_journal AS j SET cursor_id = v_high - 1, sent_id = greatest(j.sent_id, v_high - 1)
        FROM behind AS b WHERE j.shard = b.shard
    ), told AS (
        INSERT INTO transition (service, kind, cause, detail)
        SELECT 'relay', 'journal', 'skipped',
               json_build_object('shard', m.shard, 'from_id', m.cursor_id + 1, 'to_id', v_high - 1, 'rows', m.rows)
        FROM missing AS m
        WHERE m.rows > 0
    )
    SELECT coalesce(sum(m.rows), 0) INTO v_skipped FROM missing AS m;
    RETURN v_skipped;
END $$;

-- In a word why a row was refused, for the log.
CREATE OR REPLACE FUNCTION refusal_class(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(
    substring(p_error FROM '^refused by Kafka: ([A-Za-z]{1,60})'),
    replace(substring(p_error FROM '^([a-z ]{1,40}):'), ' ', '_'),
    CASE WHEN p_error ~ '^there is no topic |can''t be a topic$| has no partition ' THEN 'no_topic' END,
    'refused');

-- As before, and notes what was parked and what died in the log.
CREATE OR REPLACE FUNCTION park_rows(
    p_owner text, p_epoch bigint, p_shard smallint, p_to_id bigint,
    p_from_ids bigint[], p_to_ids bigint[], p_topics text[], p_offsets bigint[],
    p_ids bigint[], p_conversations uuid[], p_parked_topics text[], p_event_ids uuid[], p_outcomes text[],
    p_errors text[], p_waits_ms bigint[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_cursor bigint;
    v_new bigint[];
    v_dead bigint[];
BEGIN
    SELECT cursor_id INTO v_cursor FROM outbox_shard
    WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch AND cursor_id <= p_to_id
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE outbox_shard SET cursor_id = p_to_id WHERE shard = p_shard;

    INSERT INTO outbox_delivery (shard, from_id, to_id, topic, partition, base_offset, owner, epoch)
    SELECT p_shard, d.from_id, d.to_id, d.topic, p_shard, d.base_offset, p_owner, p_epoch
    FROM unnest(p_from_ids, p_to_ids, p_topics, p_offsets) AS d (from_id, to_id, topic, base_offset)
    WHERE d.to_id > v_cursor;

    WITH parked AS (
        INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state, attempts, retry_at, settled_at)
        SELECT p_shard, t.id, t.conversation_id, t.topic, t.event_id, t.outcome, (t.error IS NOT NULL)::int,
               CASE t.outcome WHEN 'failed' THEN clock_timestamp() + t.wait_ms * interval '1 millisecond' END,
               CASE t.outcome WHEN 'dead' THEN clock_timestamp() END
        FROM unnest(p_ids, p_conversations, p_parked_topics, p_event_ids, p_outcomes, p_errors, p_waits_ms)
            AS t (id, conversation_id, topic, event_id, outcome, error, wait_ms)
        ON CONFLICT (shard, id) DO NOTHING
        RETURNING id, state
    )
    SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(id) FILTER (WHERE state = 'dead'), '{}')
    INTO v_new, v_dead FROM parked;

    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    SELECT p_shard, t.id, 1, left(t.error, 1000), p_owner, p_epoch
    FROM unnest(p_ids, p_errors) AS t (id, error)
    WHERE t.error IS NOT NULL
    ON CONFLICT (shard, id, attempt) DO NOTHING;

    INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, detail)
    SELECT min(t.seq), max(t.seq), t.conversation_id, 'relay', CASE t.outcome WHEN 'dead' THEN 'dead' ELSE 'parked' END,
           CASE t.outcome WHEN 'waiting' THEN 'waiting' ELSE refusal_class(t.error) END,
           json_strip_nulls(json_build_object('topic', t.topic, 'attempt', CASE WHEN t.error IS NOT NULL THEN 1 END))
    FROM (
        SELECT i.conversation_id, left(i.topic, 100) AS topic, i.outcome, i.error, o.seq,
               o.seq - row_number() OVER (PARTITION BY i.conversation_id, i.topic, i.outcome, i.error ORDER BY o.seq) AS island
        FROM unnest(p_ids, p_conversations, p_parked_topics, p_outcomes, p_errors)
            AS i (id, conversation_id, topic, outcome, error)
        JOIN outbox AS o ON o.shard = p_shard AND o.id = i.id
        WHERE i.id = ANY (v_new)
    ) AS t
    GROUP BY t.conversation_id, t.topic, t.outcome, t.error, t.island;

    IF cardinality(v_dead) > 0 THEN
        PERFORM bury_parked(p_shard, v_dead);
        -- Nothing waits behind them.
        UPDATE dead_letter SET passed = true WHERE shard = p_shard AND outbox_id = ANY (v_dead);
    END IF;
    RETURN true;
END $$;

-- As before, and notes each row's attempt in the log: where it lies in Kafka now, why it was refused again, or died.
CREATE OR REPLACE FUNCTION settle_parked(
    p_owner text, p_epoch bigint, p_shard smallint, p_conversation uuid, p_topic text,
    p_ids bigint[], p_attempts int[], p_outcomes text[], p_offsets bigint[], p_errors text[], p_waits_ms bigint[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_settled bigint[];
    v_dead bigint[];
    v_left bigint;
    v_first bigint;
BEGIN
    PERFORM FROM outbox_shard WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;

    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    SELECT p_shard, t.id, p.attempts + 1, left(t.error, 1000), p_owner, p_epoch
    FROM unnest(p_ids, p_attempts, p_errors) AS t (id, attempts, error)
    JOIN outbox_parked AS p
        ON p.shard = p_shard AND p.id = t.id AND p.attempts = t.attempts AND p.state IN ('waiting', 'failed')
    ON CONFLICT (shard, id, attempt) DO NOTHING;

    WITH settled AS (
        UPDATE outbox_parked AS p
        SET state = t.outcome,
            attempts = p.attempts + 1,
            kafka_offset = t.kafka_offset,
            retry_at = CASE t.outcome WHEN 'failed' THEN clock_timestamp() + t.wait_ms * interval '1 millisecond' END,
            settled_at = CASE t.outcome WHEN 'failed' THEN NULL ELSE clock_timestamp() END
        FROM unnest(p_ids, p_attempts, p_outcomes, p_offsets, p_waits_ms)
            AS t (id, attempts, outcome, kafka_offset, wait_ms)
        WHERE p.shard = p_shard AND p.id = t.id AND p.attempts = t.attempts AND p.state IN ('waiting', 'failed')
        RETURNING p.id, p.state
    )
    SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(id) FILTER (WHERE state = 'dead'), '{}')
    INTO v_settled, v_dead FROM settled;
    -- What is told twice must not undo what somebody did to the letter in between.
    PERFORM bury_parked(p_shard, v_dead);

    INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, detail)
    SELECT o.seq, o.seq, p_conversation, 'relay',
           CASE t.outcome WHEN 'sent' THEN 'published' WHEN 'failed' THEN 'retried' ELSE t.outcome END,
           CASE t.outcome WHEN 'sent' THEN 'retry' ELSE refusal_class(t.error) END,
           json_strip_nulls(json_build_object(
               'topic', left(p_topic, 100), 'partition', CASE t.outcome WHEN 'sent' THEN p_shard END,
               'offset', t.kafka_offset, 'epoch', p_epoch, 'attempt', t.attempts + 1))
    FROM unnest(p_ids, p_attempts, p_outcomes, p_offsets, p_errors) AS t (id, attempts, outcome, kafka_offset, error)
    JOIN outbox AS o ON o.shard = p_shard AND o.id = t.id
    WHERE t.id = ANY (v_settled);

    SELECT count(*), min(id) INTO v_left, v_first FROM outbox_parked
    WHERE shard = p_shard AND conversation_id = p_conversation AND topic = p_topic AND state IN ('waiting', 'failed');
    UPDATE outbox_parked SET retry_at = clock_timestamp() WHERE shard = p_shard AND id = v_first AND retry_at IS NULL;

    -- A letter stays in its place while every row behind it waits; the queue's end lets later rows go out unseen.
    UPDATE dead_letter SET passed = true
    WHERE conversation_id = p_conversation AND topic = p_topic AND shard = p_shard AND NOT passed
        AND (v_left = 0
             OR outbox_id < (SELECT max(t.id) FROM unnest(p_ids, p_outcomes) AS t (id, outcome) WHERE t.outcome = 'sent'));
    RETURN v_left;
END $$;

-- As before, and notes in the log what became of the letter.
CREATE OR REPLACE FUNCTION settle_letter(
    p_owner text, p_epoch bigint, p_shard smallint, p_dead_id bigint, p_attempts int, p_offset bigint, p_error text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_letter dead_letter;
BEGIN
    PERFORM FROM outbox_shard WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE dead_letter AS d
    SET state = CASE WHEN p_error IS NULL THEN 'sent' ELSE 'dead' END,
        attempts = d.attempts + 1,
        error = coalesce(left(p_error, 1000), d.error),
        settled_at = CASE WHEN p_error IS NULL THEN clock_timestamp() END,
        kafka_offset = p_offset
    WHERE d.dead_id = p_dead_id AND d.shard = p_shard AND d.state = 'retrying' AND d.attempts = p_attempts
    RETURNING * INTO v_letter;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    VALUES (p_shard, v_letter.outbox_id, v_letter.attempts, left(p_error, 1000), p_owner, p_epoch);
    INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, detail)
    VALUES (v_letter.seq, v_letter.seq, v_letter.conversation_id, 'relay',
            CASE WHEN p_error IS NULL THEN 'published' ELSE 'dead' END,
            CASE WHEN p_error IS NULL THEN 'letter' ELSE refusal_class(p_error) END,
            json_strip_nulls(json_build_object(
                'topic', left(v_letter.topic, 100), 'partition', CASE WHEN p_error IS NULL THEN p_shard END,
                'offset', p_offset, 'epoch', p_epoch, 'attempt', v_letter.attempts, 'dead_id', p_dead_id)));
    IF p_error IS NULL THEN
        UPDATE outbox_parked SET state = 'sent', kafka_offset = p_offset, settled_at = clock_timestamp()
        WHERE shard = p_shard AND id = v_letter.outbox_id AND state = 'dead';
        UPDATE dead_letter SET passed = true
        WHERE conversation_id = v_letter.conversation_id AND topic = v_letter.topic AND shard = p_shard
            AND outbox_id < v_letter.outbox_id AND NOT passed;
    END IF;
    RETURN true;
END $$;

-- As before. What the log lacks of what is forgotten here is written first, as far as that is not too much for somebody who
-- waits; then it is taken back as the cursor is, so that what is published again is logged again.
CREATE OR REPLACE FUNCTION rewind_shard(p_shard smallint, p_id bigint, p_who text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_cursor bigint;
    v_first bigint;
BEGIN
    SELECT cursor_id INTO v_cursor FROM outbox_shard WHERE shard = p_shard FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no shard %', p_shard;
    END IF;
    IF p_id > v_cursor THEN
        RAISE EXCEPTION 'shard % has published up to id % only', p_shard, v_cursor;
    END IF;
    SELECT min(id) INTO v_first FROM outbox WHERE shard = p_shard;
    IF v_first IS NULL THEN
        RAISE EXCEPTION 'the outbox of shard % is empty', p_shard;
    END IF;
    IF p_id < v_first THEN
        RAISE EXCEPTION 'the outbox of shard % begins at id %', p_shard, v_first;
    END IF;
    PERFORM FROM outbox_journal WHERE shard = p_shard FOR UPDATE;
    FOR portion IN 1..40 LOOP  -- of at most 500 rows
        EXIT WHEN NOT (SELECT w.more FROM write_journal(ARRAY[p_shard], 500) AS w);
    END LOOP;
    UPDATE outbox_journal SET cursor_id = least(cursor_id, p_id - 1) WHERE shard = p_shard;
    INSERT INTO transition (service, kind, cause, detail)
    VALUES ('console', 'rewound', 'asked', json_build_object('shard', p_shard, 'id', p_id, 'was_at', v_cursor, 'who', p_who));
    UPDATE outbox_shard SET cursor_id = p_id - 1, owner = NULL, lease_until = NULL WHERE shard = p_shard;

    DELETE FROM outbox_delivery WHERE shard = p_shard AND to_id >= p_id AND from_id >= p_id;
    UPDATE outbox_delivery SET to_id = p_id - 1 WHERE shard = p_shard AND to_id >= p_id;
    -- A queue of which nothing is open any more lets later rows go out, and may be another one when it is parked again.
    WITH forgotten AS (
        DELETE FROM outbox_parked WHERE shard = p_shard AND id >= p_id
        RETURNING conversation_id, topic, state
    )
    UPDATE dead_letter AS d SET passed = true
    FROM (SELECT DISTINCT conversation_id, topic FROM forgotten WHERE state IN ('waiting', 'failed')) AS q
    WHERE d.conversation_id = q.conversation_id AND d.topic = q.topic AND d.shard = p_shard AND d.outbox_id < p_id
        AND NOT d.passed AND NOT EXISTS (
            SELECT FROM outbox_parked AS p
            WHERE p.shard = p_shard AND p.conversation_id = q.conversation_id AND p.topic = q.topic AND p.id < p_id
                AND p.state IN ('waiting', 'failed'));
    DELETE FROM outbox_attempt WHERE shard = p_shard AND id >= p_id;
    WITH again AS (
        UPDATE dead_letter SET state = 'rewound', settled_at = clock_timestamp()
        WHERE shard = p_shard AND outbox_id >= p_id AND state IN ('dead', 'retrying')
        RETURNING dead_id
    )
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'rewind', p_who FROM again;
    RETURN v_cursor;
END $$;

-- What people, and the window of redriving, do to a dead letter is a change of state, too.
CREATE OR REPLACE FUNCTION note_letter_action() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    INSERT INTO transition (at, from_seq, to_seq, conversation_id, service, kind, cause, detail)
    SELECT m.at, d.seq, d.seq, d.conversation_id, 'console', CASE m.action WHEN 'discard' THEN 'discarded' ELSE 'retried' END,
           m.action, json_build_object('dead_id', m.dead_id, 'who', left(m.who, 100))
    FROM made AS m
    JOIN dead_letter AS d ON d.dead_id = m.dead_id
    WHERE m.action IN ('retry', 'redrive', 'discard');
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION note_letter_action FROM PUBLIC;

REVOKE EXECUTE ON FUNCTION write_journal, journal_outbox, skip_journal FROM PUBLIC;
GRANT EXECUTE ON FUNCTION journal_outbox, skip_journal TO waybill_relay;
GRANT SELECT ON outbox_journal TO waybill_relay, waybill_console;

COMMIT;

BEGIN;
SELECT alter_patiently('dead_letter_action', $alter$
    CREATE OR REPLACE TRIGGER note_action
    AFTER INSERT ON dead_letter_action REFERENCING NEW TABLE AS made
    FOR EACH STATEMENT EXECUTE FUNCTION note_letter_action();
$alter$);
COMMIT;

-- migrate:down
