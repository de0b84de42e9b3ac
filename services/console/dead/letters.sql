-- name: newest
-- Ids of the letters that match, the newest first, those that died before ($7, $8).
SELECT d.dead_id
FROM dead_letter AS d
WHERE (cardinality($1::text[]) = 0 OR d.state = ANY ($1))
    AND ($2::uuid IS NULL OR d.conversation_id = $2)
    AND ($3::uuid IS NULL OR d.event_id = $3)
    AND ($4::smallint IS NULL OR d.shard = $4)
    AND ($5::text IS NULL OR d.origin = $5)
    AND (NOT $6::boolean OR can_retry_letter(d.origin))
    AND (d.died_at, d.dead_id) < ($7::timestamptz, $8::bigint)
ORDER BY d.died_at DESC, d.dead_id DESC
LIMIT $9

-- name: oldest
-- As newest, the oldest first, those that died after ($7, $8).
SELECT d.dead_id
FROM dead_letter AS d
WHERE (cardinality($1::text[]) = 0 OR d.state = ANY ($1))
    AND ($2::uuid IS NULL OR d.conversation_id = $2)
    AND ($3::uuid IS NULL OR d.event_id = $3)
    AND ($4::smallint IS NULL OR d.shard = $4)
    AND ($5::text IS NULL OR d.origin = $5)
    AND (NOT $6::boolean OR can_retry_letter(d.origin))
    AND (d.died_at, d.dead_id) > ($7::timestamptz, $8::bigint)
ORDER BY d.died_at, d.dead_id
LIMIT $9

-- name: letters
-- These letters, in this order. A retry keeps the order while the letter's queue waits and nothing later has passed it.
SELECT d.dead_id, d.state, d.origin, d.shard, d.outbox_id, d.conversation_id::text, d.seq, d.event_id::text, d.topic, d.type,
       octet_length(d.payload) AS payload_bytes, d.attempts, d.error, d.created_at, d.died_at, d.settled_at, d.kafka_offset,
       d.origin_cluster, d.origin_partition, d.origin_offset, d.record_key, d.cut_from,
       CASE
           WHEN d.state NOT IN ('dead', 'retrying') OR NOT can_retry_letter(d.origin) THEN NULL
           WHEN d.origin <> 'outbox' THEN 'any_order'
           WHEN NOT d.passed AND EXISTS (
               SELECT FROM outbox_parked AS p
               WHERE p.shard = d.shard AND p.conversation_id = d.conversation_id AND p.topic = d.topic
                   AND p.state IN ('waiting', 'failed')
           ) THEN 'in_order'
           ELSE 'late'
       END AS retry
FROM unnest($1::bigint[]) WITH ORDINALITY AS a (dead_id, place)
JOIN dead_letter AS d ON d.dead_id = a.dead_id
ORDER BY a.place

-- name: of_event
SELECT max(dead_id) FROM dead_letter WHERE event_id = $1

-- name: contents
SELECT source, headers, payload, redriven_at FROM dead_letter WHERE dead_id = $1

-- name: tries
SELECT a.attempt, a.at, a.error, a.owner, a.epoch
FROM dead_letter AS d
JOIN outbox_attempt AS a ON a.shard = d.shard AND a.id = d.outbox_id
WHERE d.dead_id = $1
UNION ALL
SELECT a.attempt, a.at, a.error, a.service, NULL
FROM dead_letter_attempt AS a
WHERE a.dead_id = $1
ORDER BY attempt

-- name: actions
SELECT at, action, who, reason FROM dead_letter_action WHERE dead_id = $1 ORDER BY at
