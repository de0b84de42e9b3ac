-- name: buckets
-- The next counted buckets above ($1, $2), in order, of conversations up to $3: at most $4.
SELECT c.conversation_id, c.bucket
FROM event_count AS c
WHERE c.sender_id = '' AND (c.conversation_id, c.bucket) > ($1::uuid, $2::bigint) AND c.conversation_id <= $3::uuid
ORDER BY c.conversation_id, c.bucket
LIMIT $4

-- name: differences
SELECT DISTINCT conversation_id, bucket
FROM count_differences($1, $2)
ORDER BY conversation_id, bucket

-- name: mend
SELECT sender_id, found, wanted, mended
FROM mend_counts($1, $2, $3, $4)
