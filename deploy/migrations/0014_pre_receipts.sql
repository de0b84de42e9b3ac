-- migrate:up

-- As before, and at a third of the price where nothing is missing in between, which is nearly always.
CREATE OR REPLACE FUNCTION delivered_mark(held int8multirange, visible int8multirange, head bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN upper_inf(visible) AND visible = int8multirange(range_merge(visible)) AND lower(held) <= lower(visible)
        AND held = int8multirange(range_merge(held)) AND upper(held) - 1 <= head AND lower(visible) < upper(held)
    THEN upper(held) - 1
    ELSE visible_head(held * visible, held_up_to(held, visible, head))
END;

-- The lowest 5,000 ranges of what is held. Whoever acks every other seq of a long conversation would make each of its later
-- acks, and so everybody's of the same batch, as dear as it likes. Its higher ranges are forgotten: a mark grows from below,
-- and what is forgotten is acked again by the cursor of a later `hello`.
CREATE FUNCTION lowest_ranges(held int8multirange) RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT range_agg(u.part) FROM (SELECT p AS part FROM unnest(held) AS p LIMIT 5000) AS u);

-- Class of the advisory locks of those who write marks; the second key is the shard of the conversations.
CREATE FUNCTION receipts_lock_class() RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 20821;

-- One writer of receipts and device cursors per shard, from here to the end of its transaction: then no row needs a lock
-- of its own. Called before the first look at them, in a statement of its own; in the order of shards.
CREATE FUNCTION lock_receipts(shards smallint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    one smallint;
BEGIN
    FOR one IN SELECT DISTINCT s FROM unnest(shards) AS s ORDER BY s LOOP
        PERFORM pg_advisory_xact_lock(receipts_lock_class(), one);
    END LOOP;
END $$;

-- Up to which offset refused marks have been answered. It does not go back with the stored offsets: a replay refuses the
-- same marks once more, and nobody waits for an answer to them any more. Only a topic that was made anew begins again.
CREATE TABLE ack_answered (
    topic text NOT NULL,
    partition int NOT NULL,
    cluster_id text NOT NULL,
    upto bigint NOT NULL,
    PRIMARY KEY (topic, partition, cluster_id)
) WITH (fillfactor = 50);
INSERT INTO ack_answered (topic, partition, cluster_id, upto) SELECT topic, partition, cluster_id, next FROM ack_offset;

-- Marks of members of large groups that no record tells of yet. kind is what the record will say: a read mark is news
-- beside a delivered one.
CREATE TABLE receipt_unannounced (
    shard smallint NOT NULL,
    conversation_id uuid NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    kind text NOT NULL,
    PRIMARY KEY (shard, conversation_id, user_id)
) WITH (
    -- It fills and empties every second.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000
);

-- The bytes of a `receipt` frame with what a record adds to it. Ids hold nothing that JSON escapes. device_id: of the one
-- device that it is for, or ''.
CREATE FUNCTION receipt_record(
    conversation_id uuid, user_id text, delivered_seq bigint, read_seq bigint, read_version bigint, kind text, cause text,
    device_id text
) RETURNS bytea
LANGUAGE sql STABLE PARALLEL SAFE
RETURN convert_to(
    '{"t":"receipt","conversation_id":"' || conversation_id || '","user_id":"' || user_id
    || '","delivered_seq":' || coalesce(delivered_seq, 0) || ',"read_seq":' || coalesce(read_seq, 0)
    || ',"read_version":' || coalesce(read_version, 0) || ',"kind":"' || kind || '","cause":"' || cause || '"'
    || CASE WHEN device_id = '' THEN '' ELSE ',"device_id":"' || device_id || '"' END || '}',
    'UTF8');

-- Writes receipt records with the present marks to the outbox; the last thing that its caller's transaction does.
CREATE FUNCTION announce_receipts(
    p_conversation uuid[], p_user text[], p_kind text[], p_cause text[], p_device text[]
) RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
AS $$
DECLARE
    v_shard smallint[];
BEGIN
    SELECT array_agg(c.shard ORDER BY i.ord)
    INTO v_shard
    FROM unnest(p_conversation) WITH ORDINALITY AS i (conversation_id, ord)
    JOIN conversation AS c ON c.conversation_id = i.conversation_id;
    PERFORM lock_outbox_shards(v_shard);

    INSERT INTO outbox (shard, conversation_id, event_id, topic, type, source, headers, payload, created_at)
    SELECT i.shard, i.conversation_id, uuidv7(), 'receipts.v1', 'waybill.receipt.' || i.kind, '/waybill/receipts',
           ARRAY['user_id', i.user_id, 'kind', i.kind],
           receipt_record(
               i.conversation_id, i.user_id, r.delivered_seq, r.read_seq, r.read_version, i.kind, i.cause, i.device_id),
           clock_timestamp()
    FROM unnest(v_shard, p_conversation, p_user, p_kind, p_cause, p_device)
        WITH ORDINALITY AS i (shard, conversation_id, user_id, kind, cause, device_id, ord)
    LEFT JOIN receipt AS r ON r.conversation_id = i.conversation_id AND r.user_id = i.user_id
    ORDER BY i.shard, i.conversation_id, i.ord;
END $$;

-- Announces marks of large groups that wait in these shards, at most p_most of them; how many.
CREATE FUNCTION flush_receipts(p_shards smallint[], p_most int) RETURNS int
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
AS $$
DECLARE
    v_conversation uuid[];
    v_user text[];
    v_kind text[];
BEGIN
    -- Whoever changes a mark of these shards has committed before, or begins after: none is told half.
    PERFORM lock_receipts(p_shards);
    WITH waiting AS MATERIALIZED (
        SELECT n.shard, n.conversation_id, n.user_id
        FROM unnest(p_shards) AS s (shard)
        CROSS JOIN LATERAL (
            SELECT u.* FROM receipt_unannounced AS u
            WHERE u.shard = s.shard
            ORDER BY u.conversation_id, u.user_id
            LIMIT p_most
        ) AS n
        LIMIT p_most
    ), gone AS (
        DELETE FROM receipt_unannounced AS u
        USING waiting AS n
        WHERE u.shard = n.shard AND u.conversation_id = n.conversation_id AND u.user_id = n.user_id
        RETURNING u.conversation_id, u.user_id, u.kind
    )
    SELECT array_agg(g.conversation_id), array_agg(g.user_id), array_agg(g.kind)
    INTO v_conversation, v_user, v_kind
    FROM gone AS g;
    IF v_conversation IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM announce_receipts(
        v_conversation, v_user, v_kind, ARRAY(SELECT CASE k WHEN 'delivered' THEN 'ack' ELSE k END FROM unnest(v_kind) AS k),
        array_fill(''::text, ARRAY[cardinality(v_user)]));
    RETURN cardinality(v_user);
END $$;

-- Applies a batch of acks with the offsets that it was read from, or nothing.
--
-- p_part, p_from, p_to: the batch covers offsets [from, to) of each of these partitions; a stored offset other than
-- `from` means another owner: raises WB001, nothing is applied. Without partitions nothing is asked of offsets (a dead
-- letter that is tried again). p_held: what a device says it stores, one element per (conversation, user, device),
-- folded. p_mark: proposals of read marks in the order of arrival, each with the partition and offset that it came from
-- (null: from none). p_bad: records that nobody can read, for the desk of dead letters (bury_records).
-- p_large: in a group of more members, marks are announced by flush_receipts, folded.
--
-- A mark is taken if and only if its pair (version, seq) is larger than the present one; the rule without SQL is
-- services/receipts/marks.py. Returns what was counted. Reason null: how many marks were taken, of 'delivered' how many
-- events a device acked for the first time. Reason 'stale' | 'beyond_head' | 'invisible': how many marks were refused;
-- of 'delivered' how many elements of p_held reached beyond the head, or held nothing visible. Raises WB002 with the ids in
-- its detail, and applies nothing, if acks name conversations that are not there.
--
-- The plan is made once, for arrays of any length: every table is reached by its key, however small it is and however
-- large the batch.
--
-- One call, committed by itself: a paused consumer must not hold a shard's lock. Order of locks: offsets, which nobody
-- else uses, the shards of receipts, then as every writer of the outbox its shards.
CREATE FUNCTION apply_acks(
    p_topic text, p_cluster text, p_part int[], p_from bigint[], p_to bigint[],
    p_held_conversation uuid[], p_held_user text[], p_held_device text[], p_held int8multirange[],
    p_mark_conversation uuid[], p_mark_user text[], p_mark_device text[], p_mark_kind text[],
    p_mark_version bigint[], p_mark_seq bigint[], p_mark_part int[], p_mark_offset bigint[],
    p_bad_origin text, p_bad_part int[], p_bad_offset bigint[], p_bad_key bytea[], p_bad_value bytea[],
    p_bad_headers json[], p_bad_error text[], p_large int
) RETURNS TABLE (kind text, reason text, amount bigint)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
AS $$
#variable_conflict use_column
DECLARE
    v_moved int;
    v_unknown uuid[];
    v_shards smallint[];
    v_held_head bigint[];
    v_new int8multirange[];
    v_gained bigint[];
    v_ignored text[];
    v_verdict text[];
    v_conversation uuid[];
    v_user text[];
    v_kind text[];
    v_cause text[];
    v_device text[];
    v_folds boolean[];
    v_now timestamptz := clock_timestamp();
BEGIN
    IF cardinality(p_part) > 0 THEN
        PERFORM FROM ack_offset AS o
        WHERE o.topic = p_topic AND o.cluster_id = p_cluster AND o.partition = ANY (p_part)
        ORDER BY o.partition
        FOR UPDATE;
        UPDATE ack_offset AS o
        SET next = b.upto
        FROM unnest(p_part, p_from, p_to) AS b (part, since, upto)
        WHERE o.topic = p_topic AND o.cluster_id = p_cluster AND o.partition = b.part AND o.next = b.since;
        GET DIAGNOSTICS v_moved = ROW_COUNT;
        IF v_moved <> cardinality(p_part) THEN
            RAISE EXCEPTION 'acks: another consumer moved the offsets' USING ERRCODE = 'WB001';
        END IF;
    END IF;

    -- Heads only rise: what an ack names was committed before the ack was written.
    SELECT array_agg(c.last_seq ORDER BY i.ord), array_agg(DISTINCT c.shard),
           array_agg(DISTINCT i.conversation_id) FILTER (WHERE c.shard IS NULL)
    INTO v_held_head, v_shards, v_unknown
    FROM unnest(p_held_conversation || p_mark_conversation) WITH ORDINALITY AS i (conversation_id, ord)
    LEFT JOIN conversation AS c ON c.conversation_id = i.conversation_id;
    IF v_unknown IS NOT NULL THEN
        -- The caller asks again without them.
        RAISE EXCEPTION 'acks: unknown conversations' USING ERRCODE = 'WB002', DETAIL = array_to_string(v_unknown, ',');
    END IF;
    PERFORM lock_receipts(v_shards);

    -- Delivered: what is visible, not above the head, and not acked by this device before.
    -- OFFSET 0: a value that is used more than once is computed once.
    WITH held AS MATERIALIZED (
        SELECT v.ord, v.conversation_id, v.user_id, v.device_id, v.ignored,
               CASE WHEN v.before IS NULL THEN v.valid ELSE v.valid - v.before END AS new
        FROM (
            SELECT i.ord, i.conversation_id, i.user_id, i.device_id, d.delivered AS before,
                   CASE WHEN m.user_id IS NULL THEN '{}'::int8multirange
                        WHEN i.upto <= i.head AND i.held <@ m.visible THEN i.held
                        ELSE i.held * m.visible * int8multirange(int8range(0, i.head, '[]')) END AS valid,
                   CASE WHEN m.user_id IS NULL THEN 'invisible' WHEN i.upto > i.head THEN 'beyond_head'
                        WHEN NOT i.held && m.visible THEN 'invisible' END AS ignored
            FROM (
                SELECT u.ord, u.conversation_id, u.user_id, u.device_id, u.held,
                       coalesce(upper(u.held) - 1, 9223372036854775807) AS upto,
                       v_held_head[u.ord] AS head
                FROM unnest(p_held_conversation, p_held_user, p_held_device, p_held)
                    WITH ORDINALITY AS u (conversation_id, user_id, device_id, held, ord)
                OFFSET 0
            ) AS i
            LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
            LEFT JOIN device_cursor AS d ON d.conversation_id = i.conversation_id AND d.user_id = i.user_id
                AND d.device_id = i.device_id
            OFFSET 0
        ) AS v
    ), stored AS (
        INSERT INTO device_cursor AS d (conversation_id, user_id, device_id, delivered)
        SELECT h.conversation_id, h.user_id, h.device_id,
               CASE WHEN pg_column_size(h.new) > 100000 THEN lowest_ranges(h.new) ELSE h.new END
        FROM held AS h
        WHERE NOT isempty(h.new)
        -- A hundred ranges take more than 2,000 bytes; looking at the size of what is stored costs nothing.
        ON CONFLICT (conversation_id, user_id, device_id) DO UPDATE
        SET delivered = CASE WHEN pg_column_size(d.delivered) > 2000 THEN lowest_ranges(d.delivered + excluded.delivered)
                             ELSE d.delivered + excluded.delivered END
    ), logged AS (
        INSERT INTO transition (at, from_seq, to_seq, conversation_id, service, kind, cause, user_id, device_id)
        SELECT v_now, lower(r.part), upper(r.part) - 1, h.conversation_id, 'receipts', 'delivered', 'ack', h.user_id, h.device_id
        FROM held AS h CROSS JOIN LATERAL unnest(h.new) AS r (part)
        UNION ALL
        SELECT v_now, NULL, NULL, h.conversation_id, 'receipts', 'delivered', 'refused:' || h.ignored, h.user_id, h.device_id
        FROM held AS h
        WHERE h.ignored IS NOT NULL
    )
    SELECT array_agg(h.new ORDER BY h.ord), array_agg(h.ignored ORDER BY h.ord)
    INTO v_new, v_ignored
    FROM held AS h;

    -- A proposal is judged against the present pair and every valid one before it in the batch.
    SELECT array_agg(CASE
        WHEN p.invalid IS NOT NULL THEN p.invalid
        WHEN p.pair > greatest(p.present, p.best_before) THEN 'taken'
        ELSE 'stale' END ORDER BY p.ord)
    INTO v_verdict
    FROM (
        SELECT j.*, max(CASE WHEN j.invalid IS NULL THEN j.pair END) OVER (
                   PARTITION BY j.conversation_id, j.user_id ORDER BY j.ord
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best_before
        FROM (
            SELECT i.ord, i.conversation_id, i.user_id, ARRAY[i.version, i.seq] AS pair,
                   ARRAY[coalesce(r.read_version, 0), coalesce(r.read_seq, 0)] AS present,
                   CASE WHEN m.user_id IS NULL THEN 'invisible'
                        WHEN i.seq > v_held_head[cardinality(p_held_conversation) + i.ord] THEN 'beyond_head'
                        WHEN NOT i.seq <@ m.visible AND NOT (i.seq = 0 AND i.kind = 'unread') THEN 'invisible'
                   END AS invalid
            FROM unnest(p_mark_conversation, p_mark_user, p_mark_kind, p_mark_version, p_mark_seq)
                WITH ORDINALITY AS i (conversation_id, user_id, kind, version, seq, ord)
            LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
            LEFT JOIN receipt AS r ON r.conversation_id = i.conversation_id AND r.user_id = i.user_id
        ) AS j
    ) AS p;

    -- The changes of each user's row.
    WITH stored AS (
        INSERT INTO receipt AS r (conversation_id, user_id, delivered, delivered_seq, read_version, read_seq)
        SELECT n.conversation_id, n.user_id,
               CASE WHEN n.new IS NULL THEN '{}' WHEN pg_column_size(n.new) > 100000 THEN lowest_ranges(n.new) ELSE n.new END,
               CASE WHEN n.new IS NULL THEN 0 ELSE delivered_mark(n.delivered, n.visible, n.last_seq) END,
               coalesce(n.pair[1], 0), coalesce(n.pair[2], 0)
        FROM (
            SELECT n.conversation_id, n.user_id, n.new, n.pair, m.visible, c.last_seq,
                   CASE WHEN p.delivered IS NULL THEN n.new ELSE p.delivered + n.new END AS delivered
            FROM (
            SELECT a.conversation_id, a.user_id, range_agg(a.new) AS new, max(a.pair) AS pair
            FROM (
                SELECT i.conversation_id, i.user_id, v_new[i.ord] AS new, NULL::bigint[] AS pair
                FROM unnest(p_held_conversation, p_held_user) WITH ORDINALITY AS i (conversation_id, user_id, ord)
                WHERE NOT isempty(v_new[i.ord])
                UNION ALL
                SELECT i.conversation_id, i.user_id, NULL, ARRAY[i.version, i.seq]
                FROM unnest(p_mark_conversation, p_mark_user, p_mark_version, p_mark_seq)
                    WITH ORDINALITY AS i (conversation_id, user_id, version, seq, ord)
                WHERE v_verdict[i.ord] = 'taken'
            ) AS a
            GROUP BY a.conversation_id, a.user_id
            ) AS n
            JOIN conversation AS c ON c.conversation_id = n.conversation_id
            JOIN member AS m ON m.conversation_id = n.conversation_id AND m.user_id = n.user_id
            LEFT JOIN receipt AS p ON p.conversation_id = n.conversation_id AND p.user_id = n.user_id
            OFFSET 0
        ) AS n
        ON CONFLICT (conversation_id, user_id) DO UPDATE
        SET delivered = CASE WHEN isempty(excluded.delivered) THEN r.delivered
                             WHEN pg_column_size(r.delivered) > 2000 THEN lowest_ranges(r.delivered + excluded.delivered)
                             ELSE r.delivered + excluded.delivered END,
            delivered_seq = greatest(r.delivered_seq, excluded.delivered_seq),
            read_version = (greatest(ARRAY[r.read_version, r.read_seq], ARRAY[excluded.read_version, excluded.read_seq]))[1],
            read_seq = (greatest(ARRAY[r.read_version, r.read_seq], ARRAY[excluded.read_version, excluded.read_seq]))[2],
            changed_xid = excluded.changed_xid
        RETURNING conversation_id, user_id, new.delivered_seq > coalesce(old.delivered_seq, 0) AS moved
    )
    SELECT array_agg(t.conversation_id), array_agg(t.user_id)
    INTO v_conversation, v_user
    FROM stored AS t
    WHERE t.moved;

    INSERT INTO transition (at, from_seq, to_seq, conversation_id, service, kind, cause, user_id, device_id, detail)
    SELECT v_now, i.seq, i.seq, i.conversation_id, 'receipts', i.kind,
           CASE WHEN v_verdict[i.ord] = 'taken' THEN 'ack' ELSE 'refused:' || v_verdict[i.ord] END,
           i.user_id, i.device_id, CASE WHEN i.version > 0 THEN json_build_object('version', i.version) END
    FROM unnest(p_mark_conversation, p_mark_user, p_mark_device, p_mark_kind, p_mark_version, p_mark_seq)
        WITH ORDINALITY AS i (conversation_id, user_id, device_id, kind, version, seq, ord);

    IF cardinality(p_bad_part) > 0 THEN
        PERFORM bury_records(
            p_bad_origin, p_cluster, p_bad_part, p_bad_offset, p_bad_key, p_bad_value, p_bad_headers, p_bad_error);
    END IF;

    -- One record per user and kind for what was taken, one per device for what was refused: it goes to that device,
    -- unless it was refused before.
    SELECT coalesce(v_conversation, '{}') || coalesce(array_agg(a.conversation_id), '{}'),
           coalesce(v_user, '{}') || coalesce(array_agg(a.user_id), '{}'),
           array_fill('delivered'::text, ARRAY[coalesce(cardinality(v_user), 0)]) || coalesce(array_agg(a.kind), '{}'),
           array_fill('ack'::text, ARRAY[coalesce(cardinality(v_user), 0)]) || coalesce(array_agg(a.cause), '{}'),
           array_fill(''::text, ARRAY[coalesce(cardinality(v_user), 0)]) || coalesce(array_agg(a.device_id), '{}')
    INTO v_conversation, v_user, v_kind, v_cause, v_device
    FROM (
        SELECT DISTINCT i.conversation_id, i.user_id, i.kind,
               CASE WHEN v_verdict[i.ord] = 'taken' THEN i.kind ELSE 'refused:' || v_verdict[i.ord] END AS cause,
               CASE WHEN v_verdict[i.ord] = 'taken' THEN '' ELSE i.device_id END AS device_id
        FROM unnest(p_mark_conversation, p_mark_user, p_mark_kind, p_mark_device, p_mark_part, p_mark_offset)
            WITH ORDINALITY AS i (conversation_id, user_id, kind, device_id, part, record_offset, ord)
        JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
        LEFT JOIN ack_answered AS a
            ON a.topic = p_topic AND a.partition = i.part AND a.cluster_id = p_cluster AND a.upto > i.record_offset
        WHERE v_verdict[i.ord] = 'taken' OR a.upto IS NULL
    ) AS a;
    INSERT INTO ack_answered AS a (topic, partition, cluster_id, upto)
    SELECT p_topic, b.part, p_cluster, b.upto
    FROM unnest(p_part, p_to) AS b (part, upto)
    WHERE NOT EXISTS (
        SELECT FROM ack_answered AS n
        WHERE n.topic = p_topic AND n.partition = b.part AND n.cluster_id = p_cluster AND n.upto >= b.upto)
    ON CONFLICT (topic, partition, cluster_id) DO UPDATE SET upto = excluded.upto;

    -- A group that nobody was added to has no count of its members yet.
    SELECT array_agg(c.kind = 'group' AND i.device_id = '' AND CASE
               WHEN c.members IS NOT NULL THEN c.members > p_large
               ELSE EXISTS (SELECT FROM member AS m WHERE m.conversation_id = i.conversation_id OFFSET p_large) END
               ORDER BY i.ord)
    INTO v_folds
    FROM unnest(v_conversation, v_device) WITH ORDINALITY AS i (conversation_id, device_id, ord)
    JOIN conversation AS c ON c.conversation_id = i.conversation_id;
    IF true = ANY (v_folds) THEN
        INSERT INTO receipt_unannounced AS n (shard, conversation_id, user_id, kind)
        SELECT c.shard, i.conversation_id, i.user_id, max(i.kind)
        FROM unnest(v_folds, v_conversation, v_user, v_kind) AS i (folds, conversation_id, user_id, kind)
        JOIN conversation AS c ON c.conversation_id = i.conversation_id
        WHERE i.folds
        GROUP BY c.shard, i.conversation_id, i.user_id
        ON CONFLICT (shard, conversation_id, user_id) DO UPDATE SET kind = excluded.kind
        WHERE n.kind < excluded.kind;
        SELECT array_agg(i.conversation_id), array_agg(i.user_id), array_agg(i.kind), array_agg(i.cause),
               array_agg(i.device_id)
        INTO v_conversation, v_user, v_kind, v_cause, v_device
        FROM unnest(v_folds, v_conversation, v_user, v_kind, v_cause, v_device)
            AS i (folds, conversation_id, user_id, kind, cause, device_id)
        WHERE NOT i.folds;
    END IF;

    IF v_conversation IS NOT NULL THEN
        PERFORM announce_receipts(v_conversation, v_user, v_kind, v_cause, v_device);
    END IF;

    RETURN QUERY
        SELECT 'delivered', NULL, sum(upper(r.part) - lower(r.part))::bigint
        FROM unnest(v_new) AS n (new) CROSS JOIN LATERAL unnest(n.new) AS r (part)
        HAVING count(*) > 0
        UNION ALL
        SELECT 'delivered', o, count(*) FROM unnest(v_ignored) AS o WHERE o IS NOT NULL GROUP BY o
        UNION ALL
        SELECT i.kind, CASE WHEN v_verdict[i.ord] = 'taken' THEN NULL ELSE v_verdict[i.ord] END, count(*)
        FROM unnest(p_mark_kind) WITH ORDINALITY AS i (kind, ord)
        GROUP BY 1, 2;
END $$;

REVOKE EXECUTE ON FUNCTION lock_receipts, announce_receipts, flush_receipts FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION apply_acks(
    text, text, int[], bigint[], bigint[], uuid[], text[], text[], int8multirange[], uuid[], text[], text[], text[], bigint[],
    bigint[],    int[], bigint[], text, int[], bigint[], bytea[], bytea[], json[], text[], int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lock_receipts, announce_receipts, flush_receipts TO waybill_receipts;
GRANT EXECUTE ON FUNCTION apply_acks(
    text, text, int[], bigint[], bigint[], uuid[], text[], text[], int8multirange[], uuid[], text[], text[], text[], bigint[],
    bigint[],    int[], bigint[], text, int[], bigint[], bytea[], bytea[], json[], text[], int) TO waybill_receipts;
GRANT SELECT, INSERT, UPDATE ON ack_answered TO waybill_receipts;
GRANT SELECT, INSERT, UPDATE, DELETE ON receipt_unannounced TO waybill_receipts;
GRANT SELECT ON ack_answered, receipt_unannounced TO waybill_console;

-- migrate:down
