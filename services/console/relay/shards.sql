-- name: shards
SELECT s.shard, s.owner, s.epoch, s.lease_until, coalesce(s.lease_until > clock_timestamp(), false) AS held, s.cursor_id,
       s.stopped_at, s.stopped_reason, coalesce(p.parked, 0) AS parked
FROM outbox_shard AS s
LEFT JOIN (
    SELECT shard, count(*) AS parked FROM outbox_parked WHERE state IN ('waiting', 'failed') GROUP BY shard
) AS p ON p.shard = s.shard
ORDER BY s.shard

-- name: rewind
SELECT rewind_shard($1, $2, $3)

-- name: resume
SELECT resume_shard($1)
