-- migrate:up

CREATE FUNCTION wire_time(at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');

-- The bytes of an `event` frame, the one place that builds them: live records and later reads differ only in what
-- they pass. Ids cannot hold a character that JSON escapes; body is JSON text already, or null.
CREATE FUNCTION event_frame(
    conversation_id uuid, seq bigint, event_id uuid, type text, sender_id text, client_msg_id text, body text,
    target_seq bigint, created_at timestamptz, edited_by bigint, recalled_by bigint, deleted_by bigint
) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN '{"t":"event","conversation_id":"' || conversation_id || '","seq":' || seq || ',"event_id":"' || event_id
    || '","type":"' || type || '","sender_id":"' || sender_id || '","client_msg_id":"' || client_msg_id
    || '","body":' || coalesce(body, 'null')
    || coalesce(',"target_seq":' || target_seq, '')
    || ',"created_at":"' || wire_time(created_at) || '"'
    || coalesce(',"edited_by":' || edited_by, '')
    || coalesce(',"recalled_by":' || recalled_by, '')
    || coalesce(',"deleted_by":' || deleted_by, '') || '}';

-- The event as it is now for somebody who may read `visible`: with the newest edit that they may read; without a body
-- once recalled or deleted, or if it is an edit of what they may not read or of what is recalled or deleted.
CREATE FUNCTION present_frame(e event, visible int8multirange) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT event_frame(
        e.conversation_id, e.seq, e.event_id, e.type, e.sender_id, e.client_msg_id,
        CASE
            WHEN e.recalled_by IS NOT NULL OR e.deleted_by IS NOT NULL THEN NULL
            WHEN e.type = 'edit' THEN (
                SELECT e.body::text FROM event AS t
                WHERE t.conversation_id = e.conversation_id AND t.seq = e.target_seq AND t.seq <@ visible
                  AND t.recalled_by IS NULL AND t.deleted_by IS NULL)
            WHEN e.edited_by IS NOT NULL THEN coalesce((
                SELECT n.body::text FROM event AS n
                WHERE n.conversation_id = e.conversation_id AND n.target_seq = e.seq AND n.type = 'edit'
                  AND n.seq <@ visible
                ORDER BY n.seq DESC LIMIT 1), e.body::text)
            ELSE e.body::text
        END,
        e.target_seq, e.created_at,
        CASE WHEN e.edited_by IS NOT NULL THEN (
            SELECT max(n.seq) FROM event AS n
            WHERE n.conversation_id = e.conversation_id AND n.target_seq = e.seq AND n.type = 'edit'
              AND n.seq <@ visible) END,
        e.recalled_by, e.deleted_by);
END;

-- Events above `after` that `visible` holds, ascending, at most `up_to` rows, each as `present_frame` has it: joins,
-- since a call per row costs ten times as much. Range by range: what lies between two ranges is never walked.
CREATE FUNCTION timeline_after(conversation uuid, visible int8multirange, after bigint, up_to int)
RETURNS TABLE (seq bigint, type text, target_seq bigint, frame text)
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT p.seq, p.type, p.target_seq,
        event_frame(
            p.conversation_id, p.seq, p.event_id, p.type, p.sender_id, p.client_msg_id,
            CASE WHEN p.recalled_by IS NULL AND p.deleted_by IS NULL AND (p.type <> 'edit' OR t.is_shown)
                 THEN coalesce(n.body, p.body::text) END,
            p.target_seq, p.created_at, n.seq, p.recalled_by, p.deleted_by)
    FROM (
        SELECT e.*
        FROM unnest(visible) AS r (part)
        CROSS JOIN LATERAL (
            SELECT e.*
            FROM event AS e
            WHERE e.conversation_id = conversation AND e.seq > after
              AND e.seq >= lower(r.part) AND e.seq <= coalesce(upper(r.part) - 1, 9223372036854775807)
            ORDER BY e.seq
            LIMIT up_to
        ) AS e
        ORDER BY e.seq
        LIMIT up_to
    ) AS p
    LEFT JOIN LATERAL (
        SELECT e.seq, e.body::text AS body
        FROM event AS e
        WHERE p.edited_by IS NOT NULL AND e.conversation_id = p.conversation_id AND e.target_seq = p.seq
          AND e.type = 'edit' AND e.seq <@ visible
        ORDER BY e.seq DESC
        LIMIT 1
    ) AS n ON true
    LEFT JOIN LATERAL (
        SELECT e.recalled_by IS NULL AND e.deleted_by IS NULL AS is_shown
        FROM event AS e
        WHERE p.type = 'edit' AND e.conversation_id = p.conversation_id AND e.seq = p.target_seq AND e.seq <@ visible
    ) AS t ON true
    ORDER BY p.seq;
END;

-- Events below `before` that `visible` holds, descending, at most `up_to` rows.
CREATE FUNCTION timeline_before(conversation uuid, visible int8multirange, before bigint, up_to int)
RETURNS TABLE (seq bigint, frame text)
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT p.seq,
        event_frame(
            p.conversation_id, p.seq, p.event_id, p.type, p.sender_id, p.client_msg_id,
            CASE WHEN p.recalled_by IS NULL AND p.deleted_by IS NULL AND (p.type <> 'edit' OR t.is_shown)
                 THEN coalesce(n.body, p.body::text) END,
            p.target_seq, p.created_at, n.seq, p.recalled_by, p.deleted_by)
    FROM (
        SELECT e.*
        FROM unnest(visible) AS r (part)
        CROSS JOIN LATERAL (
            SELECT e.*
            FROM event AS e
            WHERE e.conversation_id = conversation AND e.seq < before
              AND e.seq >= lower(r.part) AND e.seq <= coalesce(upper(r.part) - 1, 9223372036854775807)
            ORDER BY e.seq DESC
            LIMIT up_to
        ) AS e
        ORDER BY e.seq DESC
        LIMIT up_to
    ) AS p
    LEFT JOIN LATERAL (
        SELECT e.seq, e.body::text AS body
        FROM event AS e
        WHERE p.edited_by IS NOT NULL AND e.conversation_id = p.conversation_id AND e.target_seq = p.seq
          AND e.type = 'edit' AND e.seq <@ visible
        ORDER BY e.seq DESC
        LIMIT 1
    ) AS n ON true
    LEFT JOIN LATERAL (
        SELECT e.recalled_by IS NULL AND e.deleted_by IS NULL AS is_shown
        FROM event AS e
        WHERE p.type = 'edit' AND e.conversation_id = p.conversation_id AND e.seq = p.target_seq AND e.seq <@ visible
    ) AS t ON true
    ORDER BY p.seq DESC;
END;

-- The last seq that somebody who may read `visible` sees of a timeline that ends at `head`; 0 if none.
CREATE FUNCTION visible_head(visible int8multirange, head bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(upper(visible * int8multirange(int8range(0, head, '[]'))) - 1, 0);

-- Everything visible up to it is in `held`: the cursor of a device whose acks are `held`.
CREATE FUNCTION held_up_to(held int8multirange, visible int8multirange, head bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(
    lower((visible * int8multirange(int8range(0, head, '[]'))) - held) - 1,
    visible_head(visible, head));

-- The highest seq of `held` with everything visible below it in `held` too; 0 if none.
CREATE FUNCTION delivered_mark(held int8multirange, visible int8multirange, head bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN visible_head(held * visible, held_up_to(held, visible, head));

-- migrate:down
