-- name: stopped
SELECT stopped_reason FROM outbox_shard WHERE shard = $1

-- name: queues
SELECT DISTINCT conversation_id, topic FROM outbox_parked WHERE shard = $1 AND state IN ('waiting', 'failed')

-- name: stop
UPDATE outbox_shard SET stopped_at = clock_timestamp(), stopped_reason = $4 WHERE shard = $1 AND owner = $2 AND epoch = $3

-- name: go_on
UPDATE outbox_shard SET stopped_at = NULL, stopped_reason = NULL WHERE shard = $1 AND owner = $2 AND epoch = $3

-- name: due_queues
-- The longest due first; more come with the next look.
SELECT shard, conversation_id, topic
FROM outbox_parked
WHERE shard = ANY ($1::smallint[]) AND retry_at <= clock_timestamp()
ORDER BY retry_at
LIMIT $2

-- name: due_letters
SELECT shard, dead_id
FROM dead_letter
WHERE shard = ANY ($1::smallint[]) AND state = 'retrying' AND origin = 'outbox'
ORDER BY died_at, dead_id
LIMIT $2

-- name: queue
-- The first rows of a queue: how often each was tried, whether its time has come (the first one alone has one), and the row
-- as tail.sql reads it.
SELECT p.attempts, coalesce(p.retry_at <= clock_timestamp(), true) AS due,
       o.shard, o.id, o.conversation_id, o.seq, o.event_id, o.topic, o.type, o.source,
       CASE WHEN cardinality(o.headers) > 0 THEN o.headers END AS headers, o.payload, timestamptz_send(o.created_at) AS created_at
FROM (
    SELECT shard, id, attempts, retry_at
    FROM outbox_parked
    WHERE shard = $1 AND conversation_id = $2 AND topic = $3 AND state IN ('waiting', 'failed')
    ORDER BY id
    LIMIT $4
) AS p
JOIN outbox AS o ON o.shard = p.shard AND o.id = p.id
ORDER BY o.id

-- name: settle
SELECT settle_parked($1, $2, $3, $4, $5, $6::bigint[], $7::int[], $8::text[], $9::bigint[], $10::text[], $11::bigint[])

-- name: letter
-- Whether a later record of its conversation may be in Kafka, how often it was tried, and the row as tail.sql reads it.
SELECT passed, attempts,
       shard, outbox_id AS id, conversation_id, seq, event_id, topic, type, source,
       CASE WHEN cardinality(headers) > 0 THEN headers END AS headers, payload, timestamptz_send(created_at) AS created_at
FROM dead_letter
WHERE dead_id = $1 AND state = 'retrying'

-- name: settle_letter
SELECT settle_letter($1, $2, $3, $4, $5, $6, $7)

-- name: now
SELECT clock_timestamp()

-- name: redrive
SELECT redrive_letters($1, $2, $3)
