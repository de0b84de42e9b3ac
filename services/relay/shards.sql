-- name: announce
WITH forgotten AS (
    DELETE FROM relay_owner WHERE owner <> $1 AND seen_until < clock_timestamp() - interval '1 hour'
)
INSERT INTO relay_owner (owner, seen_until)
VALUES ($1, clock_timestamp() + make_interval(secs => $2))
ON CONFLICT (owner) DO UPDATE SET seen_until = excluded.seen_until

-- name: leave
DELETE FROM relay_owner WHERE owner = $1

-- name: live_owners
SELECT owner FROM relay_owner WHERE seen_until > clock_timestamp()

-- name: take
-- Rows that another relay is just taking are passed over.
WITH open AS (
    SELECT shard
    FROM outbox_shard
    WHERE owner IS NULL OR lease_until < clock_timestamp()
    ORDER BY shard
    LIMIT $3
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE outbox_shard AS s
SET owner = $1, epoch = s.epoch + 1, lease_until = clock_timestamp() + make_interval(secs => $2)
FROM open
WHERE s.shard = open.shard
RETURNING s.shard, s.epoch, s.cursor_id

-- name: take_own
WITH mine AS (
    SELECT shard FROM outbox_shard WHERE owner = $1 ORDER BY shard FOR NO KEY UPDATE
)
UPDATE outbox_shard AS s
SET epoch = s.epoch + 1, lease_until = clock_timestamp() + make_interval(secs => $2)
FROM mine
WHERE s.shard = mine.shard
RETURNING s.shard, s.epoch, s.cursor_id

-- name: renew
-- Rows are locked in the order of shards here, in give_back and in advance, so that none waits for another in a circle.
WITH mine AS (
    SELECT s.shard
    FROM outbox_shard AS s
    JOIN unnest($3::smallint[], $4::bigint[]) AS m (shard, epoch) ON m.shard = s.shard
    WHERE s.owner = $1 AND s.epoch = m.epoch AND (SELECT store_incarnation()) = $5
    ORDER BY s.shard
    FOR NO KEY UPDATE OF s
)
UPDATE outbox_shard AS s
SET lease_until = clock_timestamp() + make_interval(secs => $2)
FROM mine
WHERE s.shard = mine.shard
RETURNING s.shard

-- name: give_back
WITH mine AS (
    SELECT s.shard
    FROM outbox_shard AS s
    JOIN unnest($2::smallint[], $3::bigint[]) AS m (shard, epoch) ON m.shard = s.shard
    WHERE s.owner = $1 AND s.epoch = m.epoch
    ORDER BY s.shard
    FOR NO KEY UPDATE OF s
)
UPDATE outbox_shard AS s
SET owner = NULL, lease_until = NULL
FROM mine
WHERE s.shard = mine.shard
RETURNING s.shard

-- name: advance
-- Told again after a lost answer, it moves nothing and keeps no second delivery row. In another life ($10) of the store
-- nothing moves: the ids may be other rows there.
WITH mine AS (
    SELECT s.shard, m.epoch, m.to_id
    FROM outbox_shard AS s
    JOIN unnest($2::text::smallint[], $3::text::bigint[], $4::text::bigint[]) AS m (shard, epoch, to_id) ON m.shard = s.shard
    WHERE s.owner = $1 AND s.epoch = m.epoch AND s.cursor_id <= m.to_id AND (SELECT store_incarnation()) = $10
    ORDER BY s.shard
    FOR NO KEY UPDATE OF s
), moved AS (
    UPDATE outbox_shard AS s
    SET cursor_id = mine.to_id
    FROM mine
    WHERE s.shard = mine.shard
    RETURNING s.shard, s.epoch, old.cursor_id AS from_id
), kept AS (
    INSERT INTO outbox_delivery (shard, from_id, to_id, topic, partition, base_offset, owner, epoch)
    SELECT d.shard, d.from_id, d.to_id, d.topic, d.shard, d.base_offset, $1, moved.epoch
    FROM unnest($5::text::smallint[], $6::text::bigint[], $7::text::bigint[], $8::text[], $9::text::bigint[])
        AS d (shard, from_id, to_id, topic, base_offset)
    JOIN moved ON moved.shard = d.shard AND moved.from_id < d.to_id
)
SELECT shard FROM moved

-- name: park
SELECT CASE WHEN store_incarnation() = $16 THEN park_rows(
    $1, $2, $3, $4, $5::bigint[], $6::bigint[], $7::text[], $8::bigint[],
    $9::bigint[], $10::uuid[], $11::text[], $12::uuid[], $13::text[], $14::text[], $15::bigint[]) END
