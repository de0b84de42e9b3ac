-- name: versions
-- The texts that event $3 of conversation $1 has had, above seq $4, at most $5 of them and about $6 bytes, as user $2 may see
-- them (null: a service, which sees all): the event's own, then its edits. A row without a seq if there is none; `total` is
-- how many there would be without the bytes. A text is null once the event is recalled or deleted, or the text erased.
SELECT p.role, p.belongs, p.is_reader, p.is_there, p.seq, p.event_id::text, p.sender_id, wire_time(p.created_at) AS created_at,
       CASE WHEN p.is_shown THEN p.body END AS body, p.is_shown AND p.body IS NULL AS expired, p.total
FROM (
    SELECT m.role, coalesce(upper_inf(m.visible), false) AS belongs, $2::text IS NULL OR m.user_id IS NOT NULL AS is_reader,
           t.seq IS NOT NULL AS is_there, t.recalled_by IS NULL AND t.deleted_by IS NULL AS is_shown,
           v.*, count(*) OVER () AS total,
           sum(octet_length(v.body)) OVER (ORDER BY v.seq) - octet_length(v.body) AS before
    FROM conversation AS c
    LEFT JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
    CROSS JOIN LATERAL (
        SELECT CASE WHEN $2::text IS NULL THEN '{[1,)}'::int8multirange ELSE m.visible END AS visible
    ) AS s
    LEFT JOIN event AS t ON t.conversation_id = c.conversation_id AND t.seq = $3 AND t.seq <@ s.visible
        AND t.type IN ('message', 'system')
    LEFT JOIN LATERAL (
        SELECT n.seq, n.event_id, n.sender_id, n.created_at, n.body::text AS body
        FROM (
            SELECT t.seq, t.event_id, t.sender_id, t.created_at, t.body WHERE t.seq > $4
            UNION ALL
            (SELECT e.seq, e.event_id, e.sender_id, e.created_at, e.body FROM event AS e
             WHERE e.conversation_id = t.conversation_id AND e.target_seq = t.seq AND e.type = 'edit' AND e.seq > $4
               AND e.seq <@ s.visible
             ORDER BY e.seq
             LIMIT $5)
        ) AS n
        ORDER BY n.seq
        LIMIT $5
    ) AS v ON true
    WHERE c.conversation_id = $1
) AS p
WHERE coalesce(p.before, 0) < $6
ORDER BY p.seq
