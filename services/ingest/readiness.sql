-- name: outbox_room
-- The last id that was drawn, and the bounds of the last partition. Fails if the schema is not the one that we need.
SELECT s.last_value AS last_id, b.bounds[1]::bigint AS low, b.bounds[2]::bigint AS high
FROM outbox_id_seq AS s
CROSS JOIN LATERAL (
    SELECT 'write_events'::regproc, 'create_conversation'::regproc, 'timeline_after'::regproc
) AS needed
CROSS JOIN LATERAL (
    SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(\d+)''\) TO \(''(\d+)''\)') AS bounds
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'outbox'::regclass
) AS b
ORDER BY high DESC NULLS LAST
LIMIT 1
