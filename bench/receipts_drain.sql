-- name: fill
-- Conversations with the heads $2 and the members of the mix, before anybody has acked anything.
WITH given AS (
    SELECT i.conversation_id, i.shard, i.head, i.number - 1 AS number
    FROM unnest($1::uuid[], $2::smallint[], $3::bigint[]) WITH ORDINALITY AS i (conversation_id, shard, head, number)
), made AS (
    INSERT INTO conversation (conversation_id, shard, kind, history, creator_id, last_seq, created_at)
    SELECT conversation_id, shard, 'group', 'all', 'user-' || number || '-0', head, now() FROM given
)
INSERT INTO member (conversation_id, user_id, role, visible)
SELECT conversation_id, 'user-' || number || '-' || member, 'member', '{[1,)}'
FROM given, generate_series(0, $4 - 1) AS member

-- name: done
SELECT coalesce(sum(next), 0)::bigint AS acks FROM ack_offset WHERE topic = $1

-- name: written
SELECT (SELECT count(*) FROM device_cursor WHERE NOT isempty(delivered)) AS devices,
       (SELECT count(*) FROM receipt WHERE delivered_seq > 0) AS delivered,
       (SELECT count(*) FROM receipt WHERE read_seq > 0) AS read,
       (SELECT count(*) FROM outbox) AS announced
