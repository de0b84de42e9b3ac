-- migrate:up

-- What is wrong with the marks of these users in these conversations; a row per difference. The arrays run in parallel. The
-- rule without SQL is services/console/audit/rules.py; what the marks must come to is that of services/receipts/marks.py.
--
-- device_id: of the device's own ranges, null: of the user's row. found, wanted: seqs as they are and as they should be; of
-- a kind that is about ranges, found are those seqs that are there and should not be, or wanted those that are missing.
CREATE FUNCTION receipt_differences(p_conversation uuid[], p_user text[])
RETURNS TABLE (conversation_id uuid, user_id text, kind text, device_id text, found text, wanted text)
LANGUAGE sql STABLE
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT i.ord, i.conversation_id, i.user_id, c.last_seq AS head, m.visible, r.user_id IS NOT NULL AS has_marks,
               coalesce(r.delivered, '{}') AS delivered, coalesce(r.delivered_seq, 0) AS delivered_seq,
               coalesce(r.read_version, 0) AS read_version, coalesce(r.read_seq, 0) AS read_seq,
               CASE WHEN c.last_seq IS NOT NULL
                    THEN m.visible * int8multirange(int8range(1, c.last_seq, '[]')) END AS valid
        FROM unnest(p_conversation, p_user) WITH ORDINALITY AS i (conversation_id, user_id, ord)
        LEFT JOIN conversation AS c ON c.conversation_id = i.conversation_id
        LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.user_id
        LEFT JOIN receipt AS r ON r.conversation_id = i.conversation_id AND r.user_id = i.user_id
    ), held AS MATERIALIZED (
        -- All that is stored, of the user and of each device.
        SELECT a.ord, NULL AS device_id, a.delivered FROM asked AS a
        UNION ALL
        SELECT a.ord, d.device_id, d.delivered
        FROM asked AS a
        JOIN device_cursor AS d ON d.conversation_id = a.conversation_id AND d.user_id = a.user_id
    ), known AS MATERIALIZED (
        SELECT a.*, a.delivered * a.valid AS own, u.of_devices, a.delivered * a.valid + u.of_devices AS every,
               delivered_mark(a.delivered * a.valid + u.of_devices, a.visible, a.head) AS mark,
               visible_head(a.visible, a.head) AS most,
               visible_head(a.visible, least(a.head, greatest(a.read_seq, 0))) AS readable
        FROM asked AS a
        CROSS JOIN LATERAL (
            SELECT coalesce(range_agg(h.delivered * a.valid) FILTER (WHERE h.device_id IS NOT NULL), '{}') AS of_devices
            FROM held AS h
            WHERE h.ord = a.ord
        ) AS u
        WHERE a.valid IS NOT NULL
    )
    SELECT a.conversation_id, a.user_id, f.kind, f.device_id, f.found, f.wanted
    FROM (
        SELECT a.ord, 'no_member' AS kind, NULL AS device_id, a.delivered::text AS found, NULL AS wanted
        FROM asked AS a
        WHERE a.valid IS NULL
          AND (a.has_marks OR EXISTS (SELECT FROM held AS h WHERE h.ord = a.ord AND h.device_id IS NOT NULL))
        UNION ALL
        SELECT k.ord, 'beyond_head', h.device_id, (h.delivered * int8multirange(int8range(k.head, NULL, '()')))::text, NULL
        FROM known AS k JOIN held AS h ON h.ord = k.ord
        WHERE h.delivered && int8range(k.head, NULL, '()')
        UNION ALL
        SELECT k.ord, 'invisible', h.device_id,
               (h.delivered * int8multirange(int8range(NULL, k.head, '[]')) - k.visible)::text, NULL
        FROM known AS k JOIN held AS h ON h.ord = k.ord
        WHERE NOT h.delivered * int8multirange(int8range(NULL, k.head, '[]')) <@ k.visible
        UNION ALL
        SELECT k.ord, 'union_behind', NULL, NULL, (k.of_devices - k.own)::text
        FROM known AS k
        WHERE NOT k.of_devices <@ k.own
        UNION ALL
        SELECT k.ord, 'union_ahead', NULL, (k.own - k.of_devices)::text, NULL
        FROM known AS k
        WHERE NOT k.own <@ k.of_devices
        UNION ALL
        SELECT k.ord, 'mark_beyond_head', NULL, k.delivered_seq::text, k.most::text
        FROM known AS k
        WHERE k.delivered_seq > k.most
        UNION ALL
        SELECT k.ord, 'mark_behind', NULL, k.delivered_seq::text, k.mark::text
        FROM known AS k
        WHERE k.delivered_seq < k.mark
        UNION ALL
        SELECT k.ord, CASE WHEN least(k.delivered_seq, k.most) <@ k.every THEN 'mark_kept' ELSE 'mark_ahead' END, NULL,
               least(k.delivered_seq, k.most)::text, k.mark::text
        FROM known AS k
        WHERE least(k.delivered_seq, k.most) > k.mark
        UNION ALL
        SELECT k.ord, CASE WHEN k.read_seq > k.head THEN 'read_beyond_head' ELSE 'read_invisible' END, NULL,
               k.read_seq::text, k.readable::text
        FROM known AS k
        WHERE k.read_seq <> 0 AND NOT k.read_seq <@ k.valid
    ) AS f
    JOIN asked AS a ON a.ord = f.ord
    ORDER BY f.ord, f.kind, f.device_id NULLS FIRST
$$;

-- Looks again at one user's marks in a conversation, with nobody changing them meanwhile; a row per difference, and whether
-- it is mended. With p_repair all is mended that only rises, and all that claims what cannot be; with p_lower a mark that no
-- device holds, too. A user's ranges that no device holds are kept: devices may be forgotten; and so is a mark that was right
-- before the user was shown more of the past.
--
-- What is mended is written with its transitions, and with the records that tell of changed marks. Locks in the order of
-- every writer of marks: the shard of receipts, the user's rows, the shard of the outbox.
CREATE FUNCTION mend_receipts(p_conversation uuid, p_user text, p_repair boolean, p_lower boolean, p_who text)
RETURNS TABLE (kind text, device_id text, found text, wanted text, mended boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '3s'
AS $$
#variable_conflict use_column
DECLARE
    v_kinds text[];
    v_device_ids text[];
    v_found text[];
    v_wanted text[];
    v_mended boolean[];
    v_announced text[];
BEGIN
    PERFORM lock_receipts(array_agg(c.shard)) FROM conversation AS c WHERE c.conversation_id = p_conversation;
    -- Also for a writer of an older version, which locks rows.
    PERFORM FROM receipt AS r WHERE r.conversation_id = p_conversation AND r.user_id = p_user FOR UPDATE;
    PERFORM FROM device_cursor AS d
    WHERE d.conversation_id = p_conversation AND d.user_id = p_user
    ORDER BY d.device_id
    FOR UPDATE;

    SELECT array_agg(d.kind), array_agg(d.device_id), array_agg(d.found), array_agg(d.wanted),
           array_agg(p_repair AND d.kind NOT IN ('union_ahead', 'mark_kept') AND (p_lower OR d.kind <> 'mark_ahead'))
    INTO v_kinds, v_device_ids, v_found, v_wanted, v_mended
    FROM receipt_differences(ARRAY[p_conversation], ARRAY[p_user]) AS d;

    INSERT INTO transition (service, kind, cause, conversation_id, user_id, device_id, detail)
    SELECT 'console', 'repaired', i.kind, p_conversation, p_user, i.device_id,
           json_strip_nulls(json_build_object('found', i.found, 'wanted', i.wanted, 'who', p_who))
    FROM unnest(v_kinds, v_device_ids, v_found, v_wanted, v_mended) AS i (kind, device_id, found, wanted, mended)
    WHERE i.mended;

    IF 'no_member' = ANY (v_kinds) THEN
        IF p_repair THEN
            DELETE FROM receipt AS r WHERE r.conversation_id = p_conversation AND r.user_id = p_user;
            DELETE FROM device_cursor AS d WHERE d.conversation_id = p_conversation AND d.user_id = p_user;
        END IF;
    ELSIF true = ANY (v_mended) THEN
        UPDATE device_cursor AS d
        SET delivered = d.delivered * m.visible * int8multirange(int8range(1, c.last_seq, '[]'))
        FROM member AS m
        JOIN conversation AS c ON c.conversation_id = m.conversation_id
        WHERE m.conversation_id = p_conversation AND m.user_id = p_user
          AND d.conversation_id = m.conversation_id AND d.user_id = m.user_id
          AND NOT d.delivered <@ (m.visible * int8multirange(int8range(1, c.last_seq, '[]')));

        INSERT INTO receipt (conversation_id, user_id) VALUES (p_conversation, p_user) ON CONFLICT DO NOTHING;
        UPDATE receipt AS r
        SET delivered = n.every,
            delivered_seq = CASE WHEN p_lower AND NOT least(r.delivered_seq, n.most) <@ n.every THEN n.mark
                                 ELSE greatest(least(r.delivered_seq, n.most), n.mark) END,
            read_version = r.read_version + CASE WHEN n.read_holds OR r.read_version = 9223372036854775807 THEN 0 ELSE 1 END,
            read_seq = CASE WHEN n.read_holds THEN r.read_seq ELSE n.readable END,
            changed_xid = pg_current_xact_id()
        FROM (
            SELECT e.every, delivered_mark(e.every, m.visible, c.last_seq) AS mark,
                   visible_head(m.visible, c.last_seq) AS most,
                   p.read_seq = 0 OR p.read_seq <@ e.valid AS read_holds,
                   visible_head(m.visible, least(c.last_seq, greatest(p.read_seq, 0))) AS readable
            FROM receipt AS p
            JOIN conversation AS c ON c.conversation_id = p.conversation_id
            JOIN member AS m ON m.conversation_id = p.conversation_id AND m.user_id = p.user_id
            CROSS JOIN LATERAL (
                SELECT v.valid, p.delivered * v.valid + coalesce((
                    SELECT range_agg(d.delivered) FROM device_cursor AS d
                    WHERE d.conversation_id = p_conversation AND d.user_id = p_user), '{}') AS every
                FROM (SELECT m.visible * int8multirange(int8range(1, c.last_seq, '[]')) AS valid) AS v
            ) AS e
            WHERE p.conversation_id = p_conversation AND p.user_id = p_user
        ) AS n
        WHERE r.conversation_id = p_conversation AND r.user_id = p_user
        RETURNING ARRAY(
            SELECT a.kind
            FROM (VALUES ('delivered', old.delivered_seq <> new.delivered_seq),
                         ('read', (old.read_version, old.read_seq) <> (new.read_version, new.read_seq))) AS a (kind, is_news)
            WHERE a.is_news)
        INTO v_announced;

        IF cardinality(v_announced) > 0 THEN
            PERFORM announce_receipts(
                array_fill(p_conversation, ARRAY[cardinality(v_announced)]),
                array_fill(p_user, ARRAY[cardinality(v_announced)]), v_announced,
                array_fill('repair'::text, ARRAY[cardinality(v_announced)]),
                array_fill(''::text, ARRAY[cardinality(v_announced)]));
        END IF;
    END IF;
    RETURN QUERY
        SELECT i.kind, i.device_id, i.found, i.wanted, i.mended
        FROM unnest(v_kinds, v_device_ids, v_found, v_wanted, v_mended) AS i (kind, device_id, found, wanted, mended);
END $$;

-- Where the counts of these buckets (event_count) differ from a recount; a row per sender, '' is all of them. The arrays
-- run in parallel.
CREATE FUNCTION count_differences(p_conversation uuid[], p_bucket bigint[])
RETURNS TABLE (conversation_id uuid, bucket bigint, sender_id text, found bigint, wanted bigint)
LANGUAGE sql STABLE
SET enable_seqscan = off
AS $$
    SELECT i.conversation_id, i.bucket, n.sender_id, n.found, n.wanted
    FROM unnest(p_conversation, p_bucket) WITH ORDINALITY AS i (conversation_id, bucket, ord)
    CROSS JOIN LATERAL (
        SELECT b.sender_id, sum(b.found)::bigint AS found, sum(b.wanted)::bigint AS wanted
        FROM (
            SELECT c.sender_id, c.amount AS found, 0 AS wanted
            FROM event_count AS c
            WHERE c.conversation_id = i.conversation_id AND c.bucket = i.bucket
            UNION ALL
            SELECT s.sender_id, 0, 1
            FROM event AS e
            CROSS JOIN LATERAL (VALUES (''), (e.sender_id)) AS s (sender_id)
            WHERE e.conversation_id = i.conversation_id
              AND e.seq > i.bucket * count_bucket() AND e.seq <= (i.bucket + 1) * count_bucket()
              AND e.type IN ('message', 'system') AND e.recalled_by IS NULL AND e.deleted_by IS NULL
        ) AS b
        GROUP BY b.sender_id
    ) AS n
    WHERE n.found <> n.wanted
    ORDER BY i.ord, n.sender_id
$$;

-- Looks again at the counts of one bucket under the conversation's lock, and with p_repair counts it anew.
CREATE FUNCTION mend_counts(p_conversation uuid, p_bucket bigint, p_repair boolean, p_who text)
RETURNS TABLE (sender_id text, found bigint, wanted bigint, mended boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '3s'
AS $$
#variable_conflict use_column
DECLARE
    v_senders text[];
    v_found bigint[];
    v_wanted bigint[];
BEGIN
    PERFORM FROM conversation AS c WHERE c.conversation_id = p_conversation FOR NO KEY UPDATE;
    SELECT array_agg(d.sender_id), array_agg(d.found), array_agg(d.wanted)
    INTO v_senders, v_found, v_wanted
    FROM count_differences(ARRAY[p_conversation], ARRAY[p_bucket]) AS d;

    IF p_repair AND v_senders IS NOT NULL THEN
        DELETE FROM event_count AS c WHERE c.conversation_id = p_conversation AND c.bucket = p_bucket;
        PERFORM count_buckets(ARRAY[p_conversation], ARRAY[p_bucket]);
        INSERT INTO transition (service, kind, cause, conversation_id, from_seq, to_seq, user_id, detail)
        SELECT 'console', 'repaired', 'count_wrong', p_conversation, p_bucket * count_bucket() + 1,
               (p_bucket + 1) * count_bucket(), nullif(i.sender_id, ''),
               json_build_object('found', i.found, 'wanted', i.wanted, 'who', p_who)
        FROM unnest(v_senders, v_found, v_wanted) AS i (sender_id, found, wanted);
    END IF;
    RETURN QUERY
        SELECT i.sender_id, i.found, i.wanted, p_repair
        FROM unnest(v_senders, v_found, v_wanted) AS i (sender_id, found, wanted);
END $$;

REVOKE EXECUTE ON FUNCTION receipt_differences, mend_receipts, count_differences, mend_counts FROM PUBLIC;
GRANT EXECUTE ON FUNCTION receipt_differences, mend_receipts, count_differences, mend_counts TO waybill_console;

-- migrate:down
