-- name: schema
DROP TABLE IF EXISTS im_outbox, im_message, im_conversation;
CREATE TABLE im_conversation (
    conversation_id uuid PRIMARY KEY,
    last_seq bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE TABLE im_message (
    message_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    conversation_id uuid NOT NULL,
    seq bigint NOT NULL,
    sender_id text NOT NULL,
    client_msg_id text NOT NULL,
    body text NOT NULL,
    created_at timestamptz NOT NULL,
    UNIQUE (conversation_id, sender_id, client_msg_id)
);
CREATE INDEX im_message_timeline ON im_message (conversation_id, seq);
CREATE TABLE im_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    conversation_id uuid NOT NULL,
    payload text NOT NULL,
    status text NOT NULL CHECK (status IN ('PENDING', 'SENDING', 'SENT', 'FAILED')),
    retry_count int NOT NULL DEFAULT 0,
    next_retry_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
CREATE INDEX im_outbox_due ON im_outbox (status, next_retry_at, id);

-- name: add_conversations
INSERT INTO im_conversation (conversation_id) SELECT unnest($1::uuid[])

-- name: empty
TRUNCATE im_outbox, im_message

-- name: known
SELECT seq, created_at FROM im_message WHERE conversation_id = $1 AND sender_id = $2 AND client_msg_id = $3

-- name: next_seq
UPDATE im_conversation SET last_seq = last_seq + 1 WHERE conversation_id = $1 RETURNING last_seq

-- name: add_message
INSERT INTO im_message (conversation_id, seq, sender_id, client_msg_id, body, created_at)
VALUES ($1, $2, $3, $4, $5, now())
RETURNING created_at

-- name: add_outbox
INSERT INTO im_outbox (conversation_id, payload, status, next_retry_at, created_at, updated_at)
VALUES ($1, $2, 'PENDING', now() + make_interval(secs => $3), now(), now())
RETURNING id

-- name: write_at_once
WITH numbered AS (
    UPDATE im_conversation SET last_seq = last_seq + 1 WHERE conversation_id = $1 RETURNING last_seq
), written AS (
    INSERT INTO im_message (conversation_id, seq, sender_id, client_msg_id, body, created_at)
    SELECT $1, last_seq, $2, $3, $4, now() FROM numbered
    RETURNING seq, created_at
), queued AS (
    INSERT INTO im_outbox (conversation_id, payload, status, next_retry_at, created_at, updated_at)
    SELECT $1, format($5, seq), 'PENDING', now() + make_interval(secs => $6), now(), now() FROM written
    RETURNING id, payload
)
SELECT seq, created_at, id, payload FROM written, queued

-- name: claim
UPDATE im_outbox SET status = 'SENDING', updated_at = now()
WHERE id IN (
    SELECT id FROM im_outbox
    WHERE status = $1 AND next_retry_at <= now()
    ORDER BY next_retry_at, id
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
RETURNING id, conversation_id, payload

-- name: mark_sent
UPDATE im_outbox SET status = 'SENT', updated_at = now() WHERE id = ANY ($1::bigint[]) AND status <> 'SENT'

-- name: mark_failed
UPDATE im_outbox
SET status = 'FAILED', retry_count = retry_count + 1, updated_at = now(),
    next_retry_at = now() + make_interval(secs => least(300, 5 * 2 ^ retry_count))
WHERE id = ANY ($1::bigint[])

-- name: release_stale
UPDATE im_outbox SET status = 'FAILED', updated_at = now()
WHERE status = 'SENDING' AND updated_at < now() - make_interval(secs => $1)

-- name: unsent
SELECT count(*) FROM im_outbox WHERE status <> 'SENT'
