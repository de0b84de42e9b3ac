-- name: users
-- The next users with marks above ($1, $2), in order, of conversations up to $3: at most $4 of each table.
(
    SELECT false AS of_device, r.conversation_id, r.user_id
    FROM receipt AS r
    WHERE (r.conversation_id, r.user_id) > ($1::uuid, $2::text) AND r.conversation_id <= $3::uuid
    ORDER BY r.conversation_id, r.user_id
    LIMIT $4
)
UNION ALL
(
    SELECT true, d.conversation_id, d.user_id
    FROM device_cursor AS d
    WHERE (d.conversation_id, d.user_id) > ($1::uuid, $2::text) AND d.conversation_id <= $3::uuid
    ORDER BY d.conversation_id, d.user_id, d.device_id
    LIMIT $4
)

-- name: conversations_of
-- The next conversations above $2 that the user $1 is, or was, a member of: at most $3.
SELECT m.conversation_id, m.user_id
FROM member AS m
WHERE m.user_id = $1 AND m.conversation_id > $2
ORDER BY m.conversation_id
LIMIT $3

-- name: differences
SELECT DISTINCT conversation_id, user_id
FROM receipt_differences($1, $2)
ORDER BY conversation_id, user_id

-- name: mend
SELECT kind, device_id, found, wanted, mended
FROM mend_receipts($1, $2, $3, $4, $5)
