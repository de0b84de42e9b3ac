-- name: drawn
-- The highest id drawn so far, by transactions that are committed, under way or rolled back.
SELECT last_value FROM outbox_id_seq

-- name: read
-- Rows of each shard ($1) past its position ($2), at most so many of each ($3); a payload above $4 bytes is left out. The
-- lowest position ($5) and the last id drawn ($6) prune partitions once for all shards: asked anew for each of them, it
-- would cost as much as the reading. A row above $6 was drawn later, and so were all behind it in its shard. The arrays
-- come as texts: written element by element, they would cost the client more than all the rest of an empty read. In
-- another life ($7) of the store the positions mean nothing, and nothing is read.
SELECT r.shard, r.id, r.conversation_id, r.seq, r.event_id, r.topic, r.type, r.source,
       CASE WHEN cardinality(r.headers) > 0 THEN r.headers END AS headers,
       CASE WHEN octet_length(r.payload) <= $4 THEN r.payload END AS payload,
       timestamptz_send(r.created_at) AS created_at
FROM unnest($1::text::smallint[], $2::text::bigint[], $3::text::int[]) AS p (shard, after, most)
CROSS JOIN LATERAL (
    SELECT o.*
    FROM outbox AS o
    WHERE o.shard = p.shard AND o.id > p.after AND o.id > $5 AND o.id <= $6
    ORDER BY o.id
    LIMIT p.most
) AS r
WHERE (SELECT store_incarnation()) = $7

-- name: read_large
-- The same with every payload, and no more rows of a shard once $4 bytes are there. Twice as dear: each row is kept
-- aside once to add up the sizes.
SELECT r.shard, r.id, r.conversation_id, r.seq, r.event_id, r.topic, r.type, r.source,
       CASE WHEN cardinality(r.headers) > 0 THEN r.headers END AS headers, r.payload,
       timestamptz_send(r.created_at) AS created_at
FROM unnest($1::text::smallint[], $2::text::bigint[], $3::text::int[]) AS p (shard, after, most)
CROSS JOIN LATERAL (
    SELECT n.*, sum(octet_length(n.payload)) OVER (ORDER BY n.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM (
        SELECT o.*
        FROM outbox AS o
        WHERE o.shard = p.shard AND o.id > p.after AND o.id > $5 AND o.id <= $6
        ORDER BY o.id
        LIMIT p.most
    ) AS n
) AS r
WHERE coalesce(r.before, 0) < $4 AND (SELECT store_incarnation()) = $7
