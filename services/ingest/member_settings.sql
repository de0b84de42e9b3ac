-- name: set_settings
SELECT muted, muted_until, archived FROM set_settings($1, $2, $3, $4, $5, $6, $7)
