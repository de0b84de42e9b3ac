-- name: start_conversation
SELECT start_conversation($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)

-- name: conversation_state
-- A row per present member. `reads` and `belongs`: whether the user $2 ever was a member, and whether it is one now.
SELECT c.kind, c.title, c.last_seq, wire_time(c.created_at) AS created_at, wire_time(e.created_at) AS updated_at,
       r.user_id IS NOT NULL AS reads, coalesce(upper_inf(r.visible), false) AS belongs,
       m.user_id, m.role, m.visible
FROM conversation AS c
JOIN event AS e ON e.conversation_id = c.conversation_id AND e.seq = c.last_seq
LEFT JOIN member AS r ON r.conversation_id = c.conversation_id AND r.user_id = $2
LEFT JOIN member AS m ON m.conversation_id = c.conversation_id AND upper_inf(m.visible)
WHERE c.conversation_id = $1
ORDER BY m.user_id
