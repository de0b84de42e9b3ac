-- name: events_after
-- What user $2 may see of conversation $1 above $3, at most $4 events, with the membership in the same snapshot.
SELECT c.last_seq, c.title, m.role, m.visible, t.seq, t.frame
FROM conversation AS c
JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
LEFT JOIN LATERAL timeline_after(c.conversation_id, m.visible, $3, $4) AS t ON true
WHERE c.conversation_id = $1
ORDER BY t.seq

-- name: events_at
-- The events $3 of conversation $1 that user $2 may see.
SELECT e.seq, present_frame(e, m.visible) AS frame
FROM member AS m
JOIN event AS e ON e.conversation_id = m.conversation_id AND e.seq = ANY ($3::bigint[]) AND e.seq <@ m.visible
WHERE m.conversation_id = $1 AND m.user_id = $2
ORDER BY e.seq
