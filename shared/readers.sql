-- name: message_receipts
-- Who has seq $3 of conversation $1, as user $2 (null: a service) may know: see the function.
SELECT members, delivered, "read", user_id, delivered_seq, read_seq, read_version
FROM message_receipts($1, $2, $3, $4, $5, $6)
