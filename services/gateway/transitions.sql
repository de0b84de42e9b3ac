-- name: insert
-- All of a batch; the arrays run in parallel.
INSERT INTO transition (
    at, service, kind, cause, conversation_id, user_id, device_id, session_id, from_seq, to_seq, trace_id, detail)
SELECT to_timestamp(i.at), 'gateway', i.kind, i.cause, i.conversation_id, i.user_id, i.device_id, i.session_id, i.from_seq,
       i.to_seq, i.trace_id, i.detail
FROM unnest($1::float8[], $2::text[], $3::text[], $4::text[]::uuid[], $5::text[], $6::text[], $7::text[]::uuid[],
        $8::bigint[], $9::bigint[], $10::text[], $11::text[]::json[])
    AS i (at, kind, cause, conversation_id, user_id, device_id, session_id, from_seq, to_seq, trace_id, detail)

-- name: pushed
-- The same for pushes, which are many. The arrays come as texts: written element by element, they would cost the client
-- more than all the rest.
INSERT INTO transition (at, service, kind, cause, conversation_id, user_id, device_id, session_id, from_seq, to_seq)
SELECT to_timestamp(i.at), 'gateway', 'pushed', 'new', i.conversation_id, i.user_id, i.device_id, i.session_id, i.from_seq,
       i.to_seq
FROM unnest($1::text::float8[], $2::text::uuid[], $3::text::text[], $4::text::text[], $5::text::uuid[], $6::text::bigint[],
        $7::text::bigint[])
    AS i (at, conversation_id, user_id, device_id, session_id, from_seq, to_seq)
