-- name: conversations_of
SELECT m.conversation_id::text AS conversation_id
FROM member AS m
WHERE m.user_id = $1

-- name: list_conversations
-- One row per conversation of $3, as user $1 on device $2 sees it, in one snapshot.
-- Who has left sees the title as it was then.
SELECT c.conversation_id::text AS conversation_id, c.kind,
       CASE WHEN upper_inf(m.visible) THEN c.title ELSE (
           SELECT e.body ->> 'title' FROM event AS e
           WHERE e.conversation_id = c.conversation_id AND e.type = 'conversation' AND e.seq < upper(m.visible)
             AND (e.body -> 'title') IS NOT NULL
           ORDER BY e.seq DESC LIMIT 1) END AS title,
       c.history, c.last_seq, m.role, m.visible,
       visible_head(m.visible, c.last_seq) AS head,
       held_up_to(coalesce(d.delivered, '{}'), m.visible, c.last_seq) AS record,
       coalesce(r.delivered_seq, 0) AS delivered_seq,
       coalesce(r.read_seq, 0) AS read_seq,
       coalesce(r.read_version, 0) AS read_version,
       (SELECT count(*) FROM event AS e
        WHERE e.conversation_id = c.conversation_id AND e.seq > coalesce(r.read_seq, 0) AND e.seq <@ m.visible
          AND e.type IN ('message', 'system') AND e.sender_id <> m.user_id
          AND e.recalled_by IS NULL AND e.deleted_by IS NULL) AS unread,
       (SELECT wire_time(e.created_at) FROM event AS e
        WHERE e.conversation_id = c.conversation_id AND e.seq = visible_head(m.visible, c.last_seq)) AS updated_at,
       p.user_id AS peer_id, p.delivered_seq AS peer_delivered_seq, p.read_seq AS peer_read_seq,
       p.read_version AS peer_read_version
FROM member AS m
JOIN conversation AS c ON c.conversation_id = m.conversation_id
LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
LEFT JOIN device_cursor AS d ON d.conversation_id = m.conversation_id AND d.user_id = m.user_id AND d.device_id = $2
LEFT JOIN receipt AS p ON c.kind = 'direct' AND p.conversation_id = m.conversation_id AND p.user_id <> m.user_id
WHERE m.user_id = $1 AND m.conversation_id = ANY ($3::uuid[])
