-- name: of_user
SELECT r.id, r.user_id, r.device_id, r.jti, extract(epoch FROM r.before)::float8 AS before
FROM revocation AS r
WHERE r.user_id = $1

-- name: newest
SELECT r.id, r.user_id, r.device_id, r.jti, extract(epoch FROM r.before)::float8 AS before
FROM revocation AS r
WHERE r.created_at >= statement_timestamp() - make_interval(secs => $1)
ORDER BY r.created_at
