-- name: read_offsets
SELECT partition, next
FROM ack_offset
WHERE topic = $1 AND cluster_id = $2 AND partition = ANY ($3::int[]);

-- name: reset_offsets
-- Only where the offset is still the one that was found useless. One beyond the end was of another topic of this name:
-- what was answered there says nothing of the offsets here.
WITH moved AS (
    UPDATE ack_offset AS o
    SET next = i.first
    FROM unnest($3::int[], $4::bigint[], $5::bigint[]) AS i (partition, stored, first)
    WHERE o.topic = $1 AND o.cluster_id = $2 AND o.partition = i.partition AND o.next = i.stored
    RETURNING o.partition, i.stored, i.first
)
UPDATE ack_answered AS a
SET upto = m.first
FROM moved AS m
WHERE a.topic = $1 AND a.cluster_id = $2 AND a.partition = m.partition AND m.stored > m.first AND a.upto > m.first;

-- name: add_offsets
INSERT INTO ack_offset (topic, cluster_id, partition, next)
SELECT $1, $2, i.partition, i.first
FROM unnest($3::int[], $4::bigint[]) AS i (partition, first)
ORDER BY i.partition
ON CONFLICT DO NOTHING;

-- name: apply_acks
SELECT kind, reason, amount
FROM apply_acks(
    $1, $2, $3::int[], $4::bigint[], $5::bigint[],
    $6::text[]::uuid[], $7::text[], $8::text[], $9::text[]::int8multirange[],
    $10::text[]::uuid[], $11::text[], $12::text[], $13::text[], $14::bigint[], $15::bigint[], $16::int[], $17::bigint[],
    $18, $19::int[], $20::bigint[], $21::bytea[], $22::bytea[], $23::text[]::json[], $24::text[], $25);

-- name: flush_receipts
SELECT flush_receipts($1::smallint[], $2);

-- name: ping
SELECT 1 FROM ack_offset LIMIT 1;
