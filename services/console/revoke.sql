-- name: revoke
-- Void from now on; $5: forgotten after so many seconds, null is never.
INSERT INTO revocation (user_id, device_id, jti, reason, expires_at)
VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5))
RETURNING id, before
