-- name: bytes
-- Of the log: its partitions with their indexes.
SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits WHERE inhparent = 'transition'::regclass

-- name: kinds
SELECT kind, count(*) AS rows FROM transition GROUP BY kind

-- name: behind
-- Shards of which something is not published, or not in the log (if $1).
SELECT count(*)
FROM outbox_shard AS s
JOIN outbox_journal AS j ON j.shard = s.shard
LEFT JOIN LATERAL (SELECT max(o.id) AS id FROM outbox AS o WHERE o.shard = s.shard) AS last ON true
WHERE last.id > s.cursor_id OR ($1 AND j.cursor_id < s.cursor_id)
