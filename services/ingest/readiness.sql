-- name: outbox_room
-- Whether the functions that we call are there, the last id that was drawn, and the bounds of the last partition.
SELECT num_nulls(to_regproc('append_events'), to_regproc('start_conversation'), to_regproc('timeline_after'),
                 to_regproc('timeline_before')) = 0 AS has_schema,
       s.last_value AS last_id, b.bounds[1]::bigint AS low, b.bounds[2]::bigint AS high
FROM outbox_id_seq AS s
CROSS JOIN LATERAL (
    SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''(\d+)''\) TO \(''(\d+)''\)') AS bounds
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'outbox'::regclass
) AS b
ORDER BY high DESC NULLS LAST
LIMIT 1
