-- name: conversations_of_users
-- The conversations that each of these users is or was a member of, as one text with commas between.
SELECT m.user_id, string_agg(m.conversation_id::text, ',') AS ids
FROM unnest($1::text[]) AS w (user_id)
JOIN member AS m ON m.user_id = w.user_id
GROUP BY m.user_id

-- name: changed_since
-- Of each of these users ($1) all conversations, their heads, and what changed from a transaction on ($2; null: all of
-- them). Who has left sees no change of the conversation. One row for each element, and one text for each column: a row
-- per conversation would cost the reader ten times as much. A transaction of the future was told by another store, of
-- which this one is a copy: then all of it changed.
SELECT store_incarnation() AS incarnation, pg_snapshot_xmin(pg_current_snapshot())::text AS xmin, f.ids, f.heads, f.changed
FROM unnest($1::text[], $2::text::xid8[]) WITH ORDINALITY AS w (user_id, since, ord)
CROSS JOIN LATERAL (
    SELECT string_agg(m.conversation_id::text, ',') AS ids,
           string_agg(c.last_seq::text, ',') AS heads,
           string_agg(CASE WHEN w.since IS NULL OR w.since > pg_snapshot_xmax(pg_current_snapshot())
                                OR m.changed_xid >= w.since
                                OR (upper_inf(m.visible) AND c.changed_xid >= w.since)
                                OR EXISTS (
                                    SELECT FROM receipt AS r
                                    WHERE r.conversation_id = m.conversation_id AND r.changed_xid >= w.since
                                      AND r.user_id = m.user_id)
                                OR (c.kind = 'direct' AND EXISTS (
                                    SELECT FROM receipt AS r
                                    WHERE r.conversation_id = m.conversation_id AND r.changed_xid >= w.since))
                           THEN '1' ELSE '0' END, '') AS changed
    FROM member AS m
    JOIN conversation AS c ON c.conversation_id = m.conversation_id
    WHERE m.user_id = w.user_id
) AS f
ORDER BY w.ord

-- name: incarnation
SELECT store_incarnation()

-- name: list_conversations
-- One row for each element: conversation ($3) as a user ($1) on a device ($2) sees it, all in one snapshot; without a kind
-- if the user was never a member. $4, $5: a seq and the id of the event that the device holds there, or null.
-- Who has left sees the title as it was then. The receipts of a group are never walked for a peer's. muted_until is null
-- unless it is muted, and '' for ever.
SELECT CASE WHEN w.ord = 1 THEN store_incarnation() END AS incarnation,
       CASE WHEN w.ord = 1 THEN pg_snapshot_xmin(pg_current_snapshot())::text END AS xmin,
       c.kind,
       CASE WHEN upper_inf(m.visible) THEN c.title ELSE (
           SELECT e.body ->> 'title' FROM event AS e
           WHERE e.conversation_id = c.conversation_id AND e.type = 'conversation' AND e.seq < upper(m.visible)
             AND (e.body -> 'title') IS NOT NULL
           ORDER BY e.seq DESC LIMIT 1) END AS title,
       c.history = 'all' AS keeps_history, c.last_seq, m.role, m.visible::text AS visible,
       h.head,
       CASE WHEN d.delivered IS NULL THEN lower(m.visible) - 1
            ELSE held_up_to(d.delivered, m.visible, c.last_seq) END AS record,
       r.delivered_seq, r.read_seq, r.read_version,
       CASE WHEN h.head <= coalesce(r.read_seq, 0) THEN 0
            WHEN h.head - coalesce(r.read_seq, 0) <= 2 * count_bucket() THEN (
                SELECT count(*) FROM event AS e
                WHERE e.conversation_id = c.conversation_id AND e.seq > coalesce(r.read_seq, 0)
                  AND e.seq >= lower(m.visible) AND e.seq <= h.head AND e.seq <@ m.visible
                  AND e.type IN ('message', 'system') AND e.sender_id <> m.user_id
                  AND e.recalled_by IS NULL AND e.deleted_by IS NULL)
            ELSE unread_of(c.conversation_id, m.user_id, m.visible, coalesce(r.read_seq, 0), h.head) END AS unread,
       CASE WHEN is_muted(m.muted, m.muted_until) THEN coalesce(wire_time(m.muted_until), '') END AS muted_until,
       m.archived,
       (SELECT wire_time(e.created_at) FROM event AS e
        WHERE e.conversation_id = c.conversation_id AND e.seq = h.head) AS updated_at,
       w.event_id IS NOT NULL AND w.seq > 0 AND w.event_id IS DISTINCT FROM (
           SELECT e.event_id FROM event AS e WHERE e.conversation_id = c.conversation_id AND e.seq = w.seq) AS mismatch,
       p.user_id AS peer_id, p.delivered_seq AS peer_delivered_seq, p.read_seq AS peer_read_seq,
       p.read_version AS peer_read_version
FROM unnest($1::text[], $2::text[], $3::text::uuid[], $4::text::bigint[], $5::text::uuid[])
    WITH ORDINALITY AS w (user_id, device_id, conversation_id, seq, event_id, ord)
LEFT JOIN member AS m ON m.conversation_id = w.conversation_id AND m.user_id = w.user_id
LEFT JOIN conversation AS c ON c.conversation_id = m.conversation_id
LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
LEFT JOIN device_cursor AS d ON d.conversation_id = m.conversation_id AND d.user_id = m.user_id
    AND d.device_id = w.device_id
LEFT JOIN receipt AS p ON p.conversation_id = CASE c.kind WHEN 'direct' THEN m.conversation_id END
    AND p.user_id <> m.user_id
LEFT JOIN LATERAL (
    SELECT CASE WHEN upper_inf(m.visible) THEN c.last_seq ELSE visible_head(m.visible, c.last_seq) END AS head
) AS h ON true
ORDER BY w.ord
