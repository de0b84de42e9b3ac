-- name: marks_so_far
-- The marks of at most $3 users of conversation $1, in order of user id; and, without marks, those of users $2 who are
-- members now.
SELECT w.user_id, NULL::bigint AS delivered_seq, NULL::bigint AS read_seq, NULL::bigint AS read_version
FROM unnest($2::text[]) AS w (user_id)
-- No join: with few members to a conversation on average, it would walk them all for each.
WHERE (SELECT upper_inf(m.visible) FROM member AS m WHERE m.conversation_id = $1 AND m.user_id = w.user_id)
UNION ALL
(SELECT r.user_id, r.delivered_seq, r.read_seq, r.read_version
 FROM receipt AS r
 WHERE r.conversation_id = $1
 ORDER BY r.user_id
 LIMIT $3)
