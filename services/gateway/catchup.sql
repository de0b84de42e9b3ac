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
-- What user $1 may see of the events ($2[n], $3[n]): conversation and seq. Each is looked up by itself, by primary keys,
-- whatever the planner knows of the arrays.
SELECT w.conversation_id::text, w.seq, e.frame
FROM unnest($2::uuid[], $3::bigint[]) AS w (conversation_id, seq)
CROSS JOIN LATERAL (
    SELECT convert_to(present_frame(e, m.visible), 'UTF8') AS frame
    FROM member AS m
    JOIN event AS e ON e.conversation_id = m.conversation_id AND e.seq = w.seq AND e.seq <@ m.visible
    WHERE m.conversation_id = w.conversation_id AND m.user_id = $1
    LIMIT 1
) AS e
ORDER BY w.conversation_id, w.seq
