-- name: receipts_of
-- The marks of conversation $1's members but for user $2, those who read last first.
SELECT r.user_id, r.delivered_seq, r.read_seq, r.read_version
FROM receipt AS r
WHERE r.conversation_id = $1 AND r.user_id <> $2
ORDER BY r.read_seq DESC, r.user_id
LIMIT 500
