-- name: uncounted
SELECT conversation_id::text AS conversation_id, lacks FROM uncounted($1::text::uuid, $2)

-- name: close_late
SELECT close_late($1::text::uuid, $2)
