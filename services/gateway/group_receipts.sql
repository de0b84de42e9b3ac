-- name: receipts_of
-- The marks of conversation $1's members but for user $2, who has to be one of them; those who read last first.
SELECT r.user_id, r.delivered_seq, r.read_seq, r.read_version
FROM receipt AS r
WHERE r.conversation_id = $1 AND r.user_id <> $2
  AND EXISTS (
      SELECT FROM member AS m WHERE m.conversation_id = $1 AND m.user_id = $2 AND upper_inf(m.visible))
ORDER BY r.read_seq DESC, r.user_id
LIMIT 500
