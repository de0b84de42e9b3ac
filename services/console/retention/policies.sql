-- name: policies
-- The one for all first.
SELECT conversation_id::text, extract(epoch FROM age)::float8 AS age_s, set_by, set_at
FROM retention_policy
ORDER BY conversation_id NULLS FIRST
LIMIT $1

-- name: round
SELECT position IS NOT NULL AS is_under_way, nullif(begun_at, '-infinity') AS begun_at, ended_at FROM retention_round

-- name: set
SELECT set_retention($1, make_interval(secs => $2), false, $3)

-- name: clear
SELECT set_retention($1, NULL, true, $2)
