-- name: journal
SELECT read, more FROM journal_outbox($1, $2::text::smallint[], $3::text::bigint[], $4)

-- name: lag
-- Age in seconds of the oldest row of the outbox that a cursor has passed and the journal has not; null if there is none.
SELECT extract(epoch FROM clock_timestamp() - min(o.created_at))::float8
FROM outbox_shard AS s
JOIN outbox_journal AS j ON j.shard = s.shard AND j.cursor_id < s.cursor_id
CROSS JOIN LATERAL (
    SELECT n.created_at
    FROM outbox AS n
    WHERE n.shard = s.shard AND n.id > j.cursor_id AND n.id <= s.cursor_id
    ORDER BY n.id
    LIMIT 1
) AS o
