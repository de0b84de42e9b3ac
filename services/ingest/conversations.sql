-- name: create
SELECT create_conversation($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- What a conversation is now, with its members. Nothing if there is none; for a reader, `reads` and `belongs` say
-- whether they ever were a member and whether they are one.
-- name: state
SELECT c.kind, c.title, c.last_seq, wire_time(c.created_at) AS created_at, wire_time(e.created_at) AS updated_at,
       m.user_id IS NOT NULL AS reads, coalesce(upper_inf(m.visible), false) AS belongs
FROM conversation AS c
JOIN event AS e ON e.conversation_id = c.conversation_id AND e.seq = c.last_seq
LEFT JOIN member AS m ON m.conversation_id = c.conversation_id AND m.user_id = $2
WHERE c.conversation_id = $1

-- name: members
SELECT m.user_id, m.role, m.visible
FROM member AS m
WHERE m.conversation_id = $1 AND upper_inf(m.visible)
ORDER BY m.user_id
