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

-- name: backlog
-- Rows of each shard that no cursor has passed, counted up to $1: to count all of a long backlog would cost as much as to
-- read it.
SELECT s.shard, (
    SELECT count(*)
    FROM (
        SELECT
        FROM outbox AS n
        WHERE n.shard = s.shard AND n.id > s.cursor_id AND n.id <= (SELECT last_value FROM outbox_id_seq)
        LIMIT $1
    ) AS counted
)
FROM outbox_shard AS s

-- name: parked
-- Open rows, and the age in seconds of the one that is parked for the longest time.
SELECT coalesce(sum(p.rows), 0)::bigint, extract(epoch FROM clock_timestamp() - min(p.oldest))::float8
FROM outbox_shard AS s
CROSS JOIN LATERAL (
    SELECT count(*) AS rows, min(parked_at) AS oldest
    FROM outbox_parked AS o
    WHERE o.shard = s.shard AND o.state IN ('waiting', 'failed')
) AS p

-- name: letters
SELECT state, count(*) FROM dead_letter GROUP BY state
