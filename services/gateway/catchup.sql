-- name: events_of
-- Events of conversation $1 above $2, at most $3 rows and about $4 bytes, as somebody sees them who may read all above
-- $2, with the head in the same snapshot. There is one row without a seq if there is no event.
SELECT p.last_seq, p.seq, p.type, convert_to(p.frame, 'UTF8') AS frame
FROM (
    SELECT c.last_seq, t.seq, t.type, t.frame,
           sum(octet_length(t.frame)) OVER (ORDER BY t.seq) - octet_length(t.frame) AS before
    FROM conversation AS c
    LEFT JOIN LATERAL timeline_after(c.conversation_id, '{[1,)}', $2, $3) AS t ON true
    WHERE c.conversation_id = $1
) AS p
WHERE p.seq IS NULL OR p.before < $4
ORDER BY p.seq

-- name: events_after
-- What user $2 may see of conversation $1 above $3, at most $4 rows and about $5 bytes, with the membership in the same
-- snapshot.
SELECT p.last_seq, p.role, p.visible, p.seq, convert_to(p.frame, 'UTF8') AS frame
FROM (
    SELECT c.last_seq, m.role, m.visible, t.seq, t.frame,
           sum(octet_length(t.frame)) OVER (ORDER BY t.seq) - octet_length(t.frame) AS before
    FROM conversation AS c
    JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
    LEFT JOIN LATERAL timeline_after(c.conversation_id, m.visible, $3, $4) AS t ON true
    WHERE c.conversation_id = $1
) AS p
WHERE p.seq IS NULL OR p.before < $5
ORDER BY p.seq

-- name: events_at
-- The events $3 of conversation $1 that user $2 may see.
SELECT e.seq, convert_to(present_frame(e, m.visible), 'UTF8') AS frame
FROM member AS m
JOIN event AS e ON e.conversation_id = m.conversation_id AND e.seq = ANY ($3::bigint[]) AND e.seq <@ m.visible
WHERE m.conversation_id = $1 AND m.user_id = $2
ORDER BY e.seq
