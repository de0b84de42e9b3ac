-- name: page_after
-- Events of conversation $1 above $3 that user $2 may see (null: a service, which reads all), at most $4, in one snapshot.
-- Rows end after about $5 bytes; there is one without a seq if there is no event.
SELECT p.last_seq, p.visible, p.seq, convert_to(p.frame, 'UTF8') AS frame
FROM (
    SELECT c.last_seq, v.visible, t.seq, t.frame,
           sum(octet_length(t.frame)) OVER (ORDER BY t.seq) - octet_length(t.frame) AS before
    FROM conversation AS c
    CROSS JOIN LATERAL (
        SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE (
            SELECT m.visible FROM member AS m WHERE m.conversation_id = c.conversation_id AND m.user_id = $2) END AS visible
    ) AS v
    LEFT JOIN LATERAL timeline_after(c.conversation_id, v.visible, $3, $4) AS t ON true
    WHERE c.conversation_id = $1 AND v.visible IS NOT NULL
) AS p
WHERE p.seq IS NULL OR p.before < $5
ORDER BY p.seq

-- name: page_before
-- As page_after, for events below $3, descending.
SELECT p.last_seq, p.visible, p.seq, convert_to(p.frame, 'UTF8') AS frame
FROM (
    SELECT c.last_seq, v.visible, t.seq, t.frame,
           sum(octet_length(t.frame)) OVER (ORDER BY t.seq DESC) - octet_length(t.frame) AS before
    FROM conversation AS c
    CROSS JOIN LATERAL (
        SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE (
            SELECT m.visible FROM member AS m WHERE m.conversation_id = c.conversation_id AND m.user_id = $2) END AS visible
    ) AS v
    LEFT JOIN LATERAL timeline_before(c.conversation_id, v.visible, $3, $4) AS t ON true
    WHERE c.conversation_id = $1 AND v.visible IS NOT NULL
) AS p
WHERE p.seq IS NULL OR p.before < $5
ORDER BY p.seq DESC
