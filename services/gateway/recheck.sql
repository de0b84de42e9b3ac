-- name: heads
SELECT c.conversation_id::text AS conversation_id, c.last_seq
FROM conversation AS c
WHERE c.conversation_id = ANY ($1::uuid[])

-- name: belongings
SELECT m.user_id, m.conversation_id::text AS conversation_id
FROM member AS m
WHERE m.user_id = ANY ($1::text[])
