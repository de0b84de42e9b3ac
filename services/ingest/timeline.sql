-- name: page_after
-- One row per event above $3, at least one row if the conversation is there: then without a seq. $2: who reads, null
-- for a service. Rows stop after about $5 bytes. One statement, so that head, visible and events agree.
SELECT p.head, p.visible, p.seq, p.frame
FROM (
    SELECT c.last_seq AS head, v.visible, t.seq, convert_to(t.frame, 'UTF8') AS frame,
           coalesce(sum(octet_length(t.frame)) OVER (ORDER BY t.seq), 0) - coalesce(octet_length(t.frame), 0) AS before
    FROM conversation AS c
    LEFT JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
    CROSS JOIN LATERAL (SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE m.visible END) AS v (visible)
    LEFT JOIN LATERAL timeline_after(c.conversation_id, v.visible, $3, $4) AS t ON true
    WHERE c.conversation_id = $1
) AS p
WHERE p.before < $5
ORDER BY p.seq

-- name: page_before
-- As page_after, for the events below $3, highest first.
SELECT p.head, p.visible, p.seq, p.frame
FROM (
    SELECT c.last_seq AS head, v.visible, t.seq, convert_to(t.frame, 'UTF8') AS frame,
           coalesce(sum(octet_length(t.frame)) OVER (ORDER BY t.seq DESC), 0) - coalesce(octet_length(t.frame), 0)
               AS before
    FROM conversation AS c
    LEFT JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
    CROSS JOIN LATERAL (SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE m.visible END) AS v (visible)
    LEFT JOIN LATERAL timeline_before(c.conversation_id, v.visible, $3, $4) AS t ON true
    WHERE c.conversation_id = $1
) AS p
WHERE p.before < $5
ORDER BY p.seq DESC
