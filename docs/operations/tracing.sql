-- name: event_by_seq
-- The event at a seq ($2) of a conversation ($1): its id is what the others ask for.
SELECT event_id FROM event WHERE conversation_id = $1 AND seq = $2

-- name: event_by_client_id
-- The event that a sender ($2) wrote into a conversation ($1) under a client_msg_id ($3).
SELECT event_id FROM event WHERE conversation_id = $1 AND sender_id = $2 AND client_msg_id = $3

-- name: who_sent_it
SELECT e.conversation_id, e.seq, e.type, e.sender_id, e.client_msg_id, e.created_at,
       e.edited_by, e.recalled_by, e.deleted_by
FROM event AS e
WHERE e.event_id = $1

-- name: to_whom
-- Everybody who may read the event, with what is known of their devices. still_member false: they may read it, and are
-- in the conversation no more. The sender stands among them: their other devices get it, too.
SELECT m.user_id,
       m.user_id = e.sender_id AS is_sender,
       upper_inf(m.visible) AS still_member,
       coalesce(e.seq <@ r.delivered, false) AS delivered,
       coalesce(e.seq <= r.read_seq, false) AS read,
       ARRAY(SELECT d.device_id FROM device_cursor AS d
             WHERE d.conversation_id = m.conversation_id AND d.user_id = m.user_id AND e.seq <@ d.delivered
             ORDER BY d.device_id) AS devices
FROM event AS e
JOIN member AS m ON m.conversation_id = e.conversation_id AND e.seq <@ m.visible
LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
WHERE e.event_id = $1
ORDER BY m.user_id

-- name: how_often_tried
-- State and attempts of the row of the outbox. No row: it is older than the outbox's retention, so it was published, or
-- it is a dead letter (why_it_failed).
SELECT o.state, o.attempts, o.retry_at, o.waits_for, o.owner, o.epoch
FROM outbox_state AS o
WHERE o.event_id = $1

-- name: why_it_failed
-- Each attempt that Kafka refused and, error null, the one that succeeded; a row that was never refused has none.
SELECT a.attempt, a.at, a.error, a.owner
FROM (
    SELECT p.shard, p.id FROM outbox AS o
    JOIN outbox_parked AS p ON p.shard = o.shard AND p.id = o.id
    WHERE o.event_id = $1
    UNION
    SELECT d.shard, d.outbox_id FROM dead_letter AS d WHERE d.event_id = $1 AND d.outbox_id IS NOT NULL
) AS i (shard, id)
JOIN outbox_attempt AS a ON a.shard = i.shard AND a.id = i.id
ORDER BY a.shard, a.id, a.attempt

-- name: what_became_of_its_letter
-- If it became a dead letter: where that stands, and what people did with it.
SELECT d.dead_id, d.state, d.attempts, d.error, d.died_at, d.settled_at, d.kafka_offset,
       a.at AS action_at, a.action, a.who, a.reason
FROM dead_letter AS d
LEFT JOIN dead_letter_action AS a ON a.dead_id = d.dead_id
WHERE d.event_id = $1
ORDER BY d.dead_id, a.at

-- name: where_in_kafka
-- Topic without its prefix, partition and offset. A record that came again has the offset of its last copy that counted.
SELECT o.topic, o.partition, o.kafka_offset, o.acked_at
FROM outbox_state AS o
WHERE o.event_id = $1 AND o.state = 'SENT'

-- name: not_yet_delivered
-- What no device of a user has acknowledged, by user and age, the oldest first: of at most $2 users, the first of them
-- $1 ('' begins), what is at least $3 old, at most $4 events of each conversation. One's own events do not count. To go
-- on, take the last user's id and a zero byte's worth more: || chr(1).
SELECT u.user_id, n.conversation_id, n.seq, n.event_id, n.type, n.sender_id, n.created_at,
       clock_timestamp() - n.created_at AS age
FROM (SELECT DISTINCT user_id FROM member WHERE user_id >= $1 ORDER BY user_id LIMIT $2) AS u
JOIN member AS m ON m.user_id = u.user_id
JOIN conversation AS c ON c.conversation_id = m.conversation_id
LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
CROSS JOIN LATERAL (
    SELECT e.conversation_id, e.seq, e.event_id, e.type, e.sender_id, e.created_at
    FROM unnest(m.visible * int8multirange(int8range(1, c.last_seq, '[]')) - coalesce(r.delivered, '{}')) AS g
    JOIN event AS e ON e.conversation_id = c.conversation_id AND e.seq >= lower(g) AND e.seq < upper(g)
    WHERE e.sender_id <> u.user_id AND e.created_at <= clock_timestamp() - $3::interval
    ORDER BY e.seq
    LIMIT $4
) AS n
ORDER BY u.user_id, n.created_at, n.conversation_id, n.seq

-- name: what_happened
-- The log of a seq ($2) of a conversation ($1), from a time on ($3: when it was sent, so that earlier days are not looked
-- at): sent, published, pushed to each session, delivered and read by each device, and every try.
SELECT t.at, t.service, t.kind, t.cause, t.user_id, t.device_id, t.session_id, t.from_seq, t.to_seq, t.trace_id, t.detail
FROM transitions_around($1, $2, $2, $3) AS t
ORDER BY t.at

-- name: sessions_of
-- Sessions of a user ($1) from $2 to $3: when each began, and how it ended.
SELECT t.at, t.cause, t.device_id, t.session_id, t.detail
FROM transition AS t
WHERE t.conversation_id IS NULL AND t.user_id = $1 AND t.at >= $2 AND t.at < $3
ORDER BY t.at

-- name: what_happened_in_session
-- The log of one session ($2) of a user ($1), from its begin ($3) to its end ($4), over all conversations. It looks through
-- the log of each of them in these days.
SELECT t.at, t.service, t.kind, t.cause, t.conversation_id, t.from_seq, t.to_seq, t.detail
FROM transition AS t
WHERE t.conversation_id IS NULL AND t.user_id = $1 AND t.session_id = $2 AND t.at >= $3 AND t.at < $4
UNION ALL
SELECT t.at, t.service, t.kind, t.cause, t.conversation_id, t.from_seq, t.to_seq, t.detail
FROM member AS m
JOIN transition AS t ON t.conversation_id = m.conversation_id
WHERE m.user_id = $1 AND t.session_id = $2 AND t.at >= $3 AND t.at < $4
ORDER BY at
