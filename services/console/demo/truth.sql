-- name: events
SELECT conversation_id::text, seq, event_id::text
FROM event
WHERE conversation_id = ANY ($1::uuid[])
ORDER BY conversation_id, seq;

-- name: members
SELECT conversation_id::text, user_id, visible
FROM member
WHERE conversation_id = ANY ($1::uuid[]);

-- name: behind
SELECT count(*)
FROM member AS m
JOIN conversation AS c ON c.conversation_id = m.conversation_id
LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
WHERE m.conversation_id = ANY ($1::uuid[])
  AND coalesce(r.delivered_seq, 0) < visible_head(m.visible, c.last_seq);
