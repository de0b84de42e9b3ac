-- migrate:up

-- Applies a batch of acks with the offsets that it was read from, or nothing.
--
-- p_part, p_from, p_to: the batch covers offsets [from, to) of each of these partitions; a stored offset other than
-- `from` means another owner: raises WB001, nothing is applied. p_held: what a device says it stores, one element per
-- (conversation, user, device), folded. p_mark: proposals of read marks in the order of arrival.
--
-- A mark is taken if and only if its pair (version, seq) is larger than the present one; the rule without SQL is
-- services/receipts/marks.py. Returns what was counted. Reason null: how many marks were taken, of 'delivered' how many
-- events a device acked for the first time. Reason 'stale' | 'beyond_head' | 'invisible': how many marks were refused;
-- of 'delivered' how many elements of p_held reached beyond the head, or held nothing visible.
--
-- The plan is made once, for arrays of any length: every table is reached by its key, however small it is and however
-- large the batch.
--
-- One call, committed by itself: a paused consumer must not hold a shard's lock. Locks in the order of every writer
-- of the outbox: receipts, device cursors (each sorted by key), shards. The offsets come first: nobody else uses them.
CREATE FUNCTION apply_acks(
    p_topic text, p_cluster text, p_part int[], p_from bigint[], p_to bigint[],
    p_held_conversation uuid[], p_held_user text[], p_held_device text[], p_held text[],
    p_mark_conversation uuid[], p_mark_user text[], p_mark_device text[], p_mark_kind text[],
    p_mark_version bigint[], p_mark_seq bigint[]
) RETURNS TABLE (kind text, reason text, amount bigint)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_moved int;
    v_new int8multirange[];
    v_gained bigint[];
    v_ignored text[];
    v_verdict text[];
    v_conversation uuid[];
    v_user text[];
    v_kind text[];
    v_cause text[];
    v_device text[];
    v_shards smallint[];
    v_now timestamptz;
BEGIN
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

    -- The rows that this batch may change, made where they are missing, locked in the order of their keys.
    INSERT INTO receipt (conversation_id, user_id)
    SELECT m.conversation_id, m.user_id
    FROM (SELECT unnest(p_held_conversation || p_mark_conversation) AS conversation_id,
                 unnest(p_held_user || p_mark_user) AS user_id) AS i
    JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
    GROUP BY m.conversation_id, m.user_id
    ORDER BY m.conversation_id, m.user_id
    ON CONFLICT DO NOTHING;
    PERFORM FROM receipt AS r
    WHERE (r.conversation_id, r.user_id) IN (
        SELECT unnest(p_held_conversation || p_mark_conversation), unnest(p_held_user || p_mark_user))
    ORDER BY r.conversation_id, r.user_id
    FOR UPDATE;
    INSERT INTO device_cursor (conversation_id, user_id, device_id)
    SELECT m.conversation_id, m.user_id, i.device_id
    FROM unnest(p_held_conversation, p_held_user, p_held_device) AS i (conversation_id, user_id, device_id)
    JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
    ORDER BY m.conversation_id, m.user_id, i.device_id COLLATE "C"
    ON CONFLICT DO NOTHING;
    PERFORM FROM device_cursor AS d
    WHERE (d.conversation_id, d.user_id, d.device_id) IN (
        SELECT * FROM unnest(p_held_conversation, p_held_user, p_held_device))
    ORDER BY d.conversation_id, d.user_id, d.device_id
    FOR UPDATE;

    -- Delivered: what is visible, not above the head, and not acked by this device before.
    SELECT array_agg(n.valid - n.delivered ORDER BY n.ord),
           array_agg((SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(n.valid - n.delivered) AS r)
               ORDER BY n.ord),
           array_agg(CASE WHEN n.valid IS NULL THEN 'invisible'
                          WHEN NOT n.held <@ n.timeline THEN 'beyond_head'
                          WHEN isempty(n.valid) THEN 'invisible' END ORDER BY n.ord)
    INTO v_new, v_gained, v_ignored
    FROM (
        SELECT j.*, j.held * j.visible * j.timeline AS valid
        FROM (
            SELECT i.ord, i.held::int8multirange AS held, m.visible, d.delivered,
                   int8multirange(int8range(0, c.last_seq, '[]')) AS timeline
            FROM unnest(p_held_conversation, p_held_user, p_held_device, p_held)
                WITH ORDINALITY AS i (conversation_id, user_id, device_id, held, ord)
            LEFT JOIN conversation AS c ON c.conversation_id = i.conversation_id
            LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
            LEFT JOIN device_cursor AS d ON d.conversation_id = i.conversation_id AND d.user_id = i.user_id
                AND d.device_id = i.device_id
        ) AS j
    ) AS n;
    UPDATE device_cursor AS d
    SET delivered = d.delivered + v_new[i.ord]
    FROM unnest(p_held_conversation, p_held_user, p_held_device)
        WITH ORDINALITY AS i (conversation_id, user_id, device_id, ord)
    WHERE d.conversation_id = i.conversation_id AND d.user_id = i.user_id AND d.device_id = i.device_id
      AND v_gained[i.ord] > 0;

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
                   ARRAY[r.read_version, r.read_seq] AS present,
                   CASE WHEN m.user_id IS NULL THEN 'invisible'
                        WHEN i.seq > c.last_seq THEN 'beyond_head'
                        WHEN NOT i.seq <@ m.visible AND NOT (i.seq = 0 AND i.kind = 'unread') THEN 'invisible'
                   END AS invalid
            FROM unnest(p_mark_conversation, p_mark_user, p_mark_kind, p_mark_version, p_mark_seq)
                WITH ORDINALITY AS i (conversation_id, user_id, kind, version, seq, ord)
            LEFT JOIN conversation AS c ON c.conversation_id = i.conversation_id
            LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
            LEFT JOIN receipt AS r ON r.conversation_id = i.conversation_id AND r.user_id = i.user_id
        ) AS j
    ) AS p;

    -- The changes of each user's row, and with them the records to announce.
    WITH gained AS (
        SELECT i.conversation_id, i.user_id, range_agg(v_new[i.ord]) AS new
        FROM unnest(p_held_conversation, p_held_user) WITH ORDINALITY AS i (conversation_id, user_id, ord)
        WHERE v_gained[i.ord] > 0
        GROUP BY i.conversation_id, i.user_id
    ), risen AS (
        UPDATE receipt AS r
        SET delivered = r.delivered + g.new,
            delivered_seq = greatest(r.delivered_seq, delivered_mark(r.delivered + g.new, m.visible, c.last_seq)),
            changed_xid = pg_current_xact_id()
        FROM gained AS g
        JOIN conversation AS c ON c.conversation_id = g.conversation_id
        JOIN member AS m ON m.conversation_id = g.conversation_id AND m.user_id = g.user_id
        WHERE r.conversation_id = g.conversation_id AND r.user_id = g.user_id
        RETURNING r.conversation_id, r.user_id, old.delivered_seq < new.delivered_seq AS moved
    )
    SELECT array_agg(conversation_id), array_agg(user_id), array_agg('delivered'::text), array_agg('ack'::text),
           array_agg(''::text)
    INTO v_conversation, v_user, v_kind, v_cause, v_device
    FROM risen
    WHERE moved;

    UPDATE receipt AS r
    SET read_version = b.pair[1], read_seq = b.pair[2], changed_xid = pg_current_xact_id()
    FROM (
        SELECT i.conversation_id, i.user_id, max(ARRAY[i.version, i.seq]) AS pair
        FROM unnest(p_mark_conversation, p_mark_user, p_mark_version, p_mark_seq)
            WITH ORDINALITY AS i (conversation_id, user_id, version, seq, ord)
        WHERE v_verdict[i.ord] = 'taken'
        GROUP BY i.conversation_id, i.user_id
    ) AS b
    WHERE r.conversation_id = b.conversation_id AND r.user_id = b.user_id
      AND b.pair > ARRAY[r.read_version, r.read_seq];

    -- One record per user and kind for what was taken, one per device for what was refused: it goes to that device.
    SELECT v_conversation || coalesce(array_agg(a.conversation_id), '{}'), v_user || coalesce(array_agg(a.user_id), '{}'),
           v_kind || coalesce(array_agg(a.kind), '{}'), v_cause || coalesce(array_agg(a.cause), '{}'),
           v_device || coalesce(array_agg(a.device_id), '{}')
    INTO v_conversation, v_user, v_kind, v_cause, v_device
    FROM (
        SELECT DISTINCT i.conversation_id, i.user_id, i.kind,
               CASE WHEN v_verdict[i.ord] = 'taken' THEN i.kind ELSE 'refused:' || v_verdict[i.ord] END AS cause,
               CASE WHEN v_verdict[i.ord] = 'taken' THEN '' ELSE i.device_id END AS device_id
        FROM unnest(p_mark_conversation, p_mark_user, p_mark_kind, p_mark_device)
            WITH ORDINALITY AS i (conversation_id, user_id, kind, device_id, ord)
        JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
    ) AS a;

    SELECT array_agg(DISTINCT c.shard) INTO v_shards
    FROM conversation AS c
    WHERE c.conversation_id = ANY (v_conversation);
    PERFORM lock_outbox_shards(v_shards);

    v_now := clock_timestamp();
    INSERT INTO outbox (shard, conversation_id, event_id, topic, type, source, headers, payload, created_at)
    SELECT c.shard, i.conversation_id, uuidv7(), 'receipts.v1', 'waybill.receipt.' || i.kind, '/waybill/receipts',
           ARRAY['user_id', i.user_id, 'kind', i.kind],
           convert_to('{"t":"receipt","conversation_id":"' || i.conversation_id || '","user_id":"' || i.user_id
               || '","delivered_seq":' || coalesce(r.delivered_seq, 0) || ',"read_seq":' || coalesce(r.read_seq, 0)
               || ',"read_version":' || coalesce(r.read_version, 0) || ',"kind":"' || i.kind || '","cause":"' || i.cause
               || '"' || CASE WHEN i.device_id = '' THEN '' ELSE ',"device_id":"' || i.device_id || '"' END || '}',
               'UTF8'),
           v_now
    FROM unnest(v_conversation, v_user, v_kind, v_cause, v_device)
        WITH ORDINALITY AS i (conversation_id, user_id, kind, cause, device_id, ord)
    JOIN conversation AS c ON c.conversation_id = i.conversation_id
    LEFT JOIN receipt AS r ON r.conversation_id = i.conversation_id AND r.user_id = i.user_id
    ORDER BY c.shard, i.conversation_id, i.ord;

    RETURN QUERY
        SELECT 'delivered', NULL, sum(g)::bigint FROM unnest(v_gained) AS g HAVING sum(g) > 0
        UNION ALL
        SELECT 'delivered', o, count(*) FROM unnest(v_ignored) AS o WHERE o IS NOT NULL GROUP BY o
        UNION ALL
        SELECT i.kind, CASE WHEN v_verdict[i.ord] = 'taken' THEN NULL ELSE v_verdict[i.ord] END, count(*)
        FROM unnest(p_mark_kind) WITH ORDINALITY AS i (kind, ord)
        GROUP BY 1, 2;
END $$;

REVOKE EXECUTE ON FUNCTION apply_acks FROM PUBLIC;
GRANT EXECUTE ON FUNCTION apply_acks TO waybill_receipts;

-- migrate:down
