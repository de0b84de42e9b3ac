-- name: now
SELECT store_incarnation()
