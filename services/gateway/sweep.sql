-- name: ends
-- The highest id of each shard, 0 without any, and whose they are.
SELECT s.shard, coalesce((SELECT o.id FROM outbox AS o WHERE o.shard = s.shard ORDER BY o.id DESC LIMIT 1), 0) AS id,
       store_incarnation() AS incarnation
FROM unnest($1::text::smallint[]) AS s (shard)

-- name: sweep
-- What each shard ($1) holds above an id ($2), at most $4 rows of each, folded: the store; per shard the last id that was
-- read and how many rows; per conversation the highest seq; each event that changes a membership or a conversation; the
-- ids of receipts. The lowest of the ids ($3) and the last one drawn prune partitions once for all shards.
WITH read AS MATERIALIZED (
    SELECT r.*
    FROM unnest($1::text::smallint[], $2::text::bigint[]) AS p (shard, after)
    CROSS JOIN LATERAL (
        SELECT o.shard, o.id, o.conversation_id, o.seq, o.topic, o.type
        FROM outbox AS o
        WHERE o.shard = p.shard AND o.id > p.after AND o.id > $3 AND o.id <= (SELECT last_value FROM outbox_id_seq)
        ORDER BY o.id
        LIMIT $4
    ) AS r
)
SELECT 'store' AS kind, NULL::smallint AS shard, NULL::bigint AS id, NULL::bigint AS seq, NULL AS conversation_id,
       store_incarnation() AS text
UNION ALL
SELECT 'end', r.shard, max(r.id), count(*), NULL, NULL
FROM read AS r
GROUP BY r.shard
UNION ALL
SELECT 'head', NULL, NULL, max(r.seq), r.conversation_id::text, NULL
FROM read AS r
WHERE r.topic = 'events.v1'
GROUP BY r.conversation_id
UNION ALL
SELECT 'change', r.shard, r.id, r.seq, r.conversation_id::text, r.type
FROM read AS r
WHERE r.topic = 'events.v1' AND r.type IN ('waybill.event.member', 'waybill.event.conversation')
UNION ALL
SELECT 'receipts', r.shard, NULL, NULL, NULL, string_agg(r.id::text, ',')
FROM read AS r
WHERE r.topic = 'receipts.v1'
GROUP BY r.shard

-- name: contents
-- The rows with these shards ($1) and ids ($2), in their order.
SELECT o.shard, o.id, o.conversation_id::text AS conversation_id, o.seq, o.type, o.payload,
       extract(epoch FROM o.created_at)::float8 AS committed
FROM unnest($1::text::smallint[], $2::text::bigint[]) WITH ORDINALITY AS p (shard, id, ord)
JOIN outbox AS o ON o.shard = p.shard AND o.id = p.id
ORDER BY p.ord
