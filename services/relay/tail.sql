-- name: read
-- Rows of each shard ($1) past its position ($2): at most $3 of them, and no more once $4 bytes are there. The upper
-- bound, read in the same statement and never below an id that its snapshot shows, prunes the partitions ahead.
SELECT r.shard, r.id, r.conversation_id, r.seq, r.event_id, r.topic, r.type, r.source,
       CASE WHEN cardinality(r.headers) > 0 THEN r.headers END AS headers, r.payload, timestamptz_send(r.created_at) AS created_at
FROM unnest($1::smallint[], $2::bigint[]) AS p (shard, after)
CROSS JOIN LATERAL (
    SELECT n.*, sum(octet_length(n.payload)) OVER (ORDER BY n.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        SELECT o.*
        FROM outbox AS o
        WHERE o.shard = p.shard AND o.id > p.after AND o.id <= (SELECT last_value FROM outbox_id_seq)
        ORDER BY o.id
        LIMIT $3
    ) AS n
) AS r
WHERE coalesce(r.before, 0) < $4

-- name: oldest_unsent
-- Age in seconds of the oldest row that no cursor has passed; null if there is none.
SELECT extract(epoch FROM clock_timestamp() - min(o.created_at))::float8
FROM outbox_shard AS s
CROSS JOIN LATERAL (
    SELECT n.created_at
    FROM outbox AS n
    WHERE n.shard = s.shard AND n.id > s.cursor_id AND n.id <= (SELECT last_value FROM outbox_id_seq)
    ORDER BY n.id
    LIMIT 1
) AS o
