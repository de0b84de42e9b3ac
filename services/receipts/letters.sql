-- name: claim
SELECT dead_id, attempts, partition, at, key, value, is_cut FROM claim_letters($1, $2, $3, $4)

-- name: settle
SELECT settle_claimed('receipts', $1, $2, $3, $4, $5, $6)
