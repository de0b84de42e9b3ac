-- name: page_after
-- Events of conversation $1 above $3 that user $2 may see (null: a service, which reads all), at most $4, in one snapshot.
SELECT c.last_seq, v.visible, t.seq, t.frame
FROM conversation AS c
CROSS JOIN LATERAL (
    SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE (
        SELECT m.visible FROM member AS m WHERE m.conversation_id = c.conversation_id AND m.user_id = $2) END AS visible
) AS v
LEFT JOIN LATERAL timeline_after(c.conversation_id, v.visible, $3, $4) AS t ON true
WHERE c.conversation_id = $1 AND v.visible IS NOT NULL
ORDER BY t.seq

-- name: page_before
SELECT c.last_seq, v.visible, t.seq, t.frame
FROM conversation AS c
CROSS JOIN LATERAL (
    SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE (
        SELECT m.visible FROM member AS m WHERE m.conversation_id = c.conversation_id AND m.user_id = $2) END AS visible
) AS v
LEFT JOIN LATERAL timeline_before(c.conversation_id, v.visible, $3, $4) AS t ON true
WHERE c.conversation_id = $1 AND v.visible IS NOT NULL
ORDER BY t.seq DESC
