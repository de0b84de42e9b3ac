-- name: make
SELECT make_outbox_partitions($1)

-- name: close
SELECT close_outbox_partition(make_interval(secs => $1))

-- name: summarise
SELECT summarise_outbox()

-- name: skip_journal
SELECT skip_journal(make_interval(secs => $1))

-- name: drop
SELECT drop_outbox_partition(make_interval(secs => $1))

-- name: drop_deliveries
SELECT drop_delivery_partition()

-- name: forget_parked
SELECT forget_parked($1)

-- name: expire_letters
SELECT dead_id, state, event_id, conversation_id, topic, error, died_at FROM expire_letters(make_interval(secs => $1), $2)

-- name: make_days
SELECT make_transition_partitions($1)

-- name: drop_day
SELECT drop_transition_partition(make_interval(secs => $1))

-- name: forget_revocations
SELECT forget_revocations()

-- name: gauges
-- Partitions above and below the one that ids are drawn in, and the age in seconds of the oldest letter that nobody settled.
SELECT count(*) FILTER (WHERE p.low > n.id) AS ahead,
       count(*) FILTER (WHERE p.high <= n.id) AS behind,
       (SELECT extract(epoch FROM clock_timestamp() - min(o.died_at))::float8
        FROM outbox_shard AS s
        CROSS JOIN LATERAL (
            SELECT d.died_at FROM dead_letter AS d
            WHERE d.shard = s.shard AND d.state IN ('dead', 'retrying')
            ORDER BY d.died_at LIMIT 1
        ) AS o) AS oldest_letter_s
FROM outbox_partitions('outbox') AS p
CROSS JOIN next_outbox_id() AS n (id)
