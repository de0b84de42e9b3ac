-- name: heads
SELECT c.conversation_id::text AS conversation_id, c.last_seq
FROM conversation AS c
WHERE c.conversation_id = ANY ($1::uuid[])

-- name: belongings
SELECT m.user_id, m.conversation_id::text AS conversation_id
FROM member AS m
WHERE m.user_id = ANY ($1::text[])

-- name: receipts
SELECT r.conversation_id::text AS conversation_id, r.user_id, r.delivered_seq, r.read_seq, r.read_version
FROM receipt AS r
WHERE r.conversation_id = ANY ($1::uuid[])
