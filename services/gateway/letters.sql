-- name: bury
SELECT bury_stream_records($1, $2, $3::int[], $4::bigint[], $5::bytea[], $6::bytea[], $7::text[]::json[], $8::text[])
