-- name: numbers
-- The session numbers of devices, by user ($1) and device ($2).
SELECT d.user_id, d.device_id, d.number
FROM unnest($1::text[], $2::text[]) AS p (user_id, device_id)
JOIN device_session AS d ON d.user_id = p.user_id AND d.device_id = p.device_id
