-- name: write
-- Events as they are in Kafka, with the heads of their conversations; what is there already stays as it is.
WITH published AS (
    SELECT *
    FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[])
        AS p (conversation_id, seq, event_id, sender_id, client_msg_id, body, created_at)
), written AS (
    INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body, created_at)
    SELECT conversation_id, seq, event_id, 'message', sender_id, client_msg_id, '', body::json, created_at::timestamptz
    FROM published
    ON CONFLICT DO NOTHING
)
UPDATE conversation AS c
SET last_seq = greatest(c.last_seq, p.head), changed_xid = pg_current_xact_id()
FROM (SELECT conversation_id, max(seq) AS head FROM published GROUP BY conversation_id) AS p
WHERE c.conversation_id = p.conversation_id
