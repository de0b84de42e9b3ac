-- name: open_sessions
-- The number of each hello's session, by its ordinal; none for a token that is void. Then the revocations of these users.
SELECT o.ord, o.number, NULL::bigint AS id, NULL AS user_id, NULL AS device_id, NULL AS jti, NULL::float8 AS before
FROM open_sessions($1, $2, $3::text[]::uuid[], $4, $5, $6) AS o
UNION ALL
SELECT NULL, NULL, r.id, r.user_id, r.device_id, r.jti, extract(epoch FROM r.before)::float8
FROM revocation AS r
WHERE r.user_id = ANY ($1)
