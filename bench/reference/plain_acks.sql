-- name: schema
DROP TABLE IF EXISTS plain_receipt;
CREATE TABLE plain_receipt (
    conversation_id uuid NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    delivered_seq bigint NOT NULL DEFAULT 0,
    read_seq bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (conversation_id, user_id)
) WITH (fillfactor = 70)

-- name: delivered
INSERT INTO plain_receipt AS r (conversation_id, user_id, delivered_seq, updated_at)
VALUES ($1, $2, $3, now())
ON CONFLICT (conversation_id, user_id) DO UPDATE
SET delivered_seq = excluded.delivered_seq, updated_at = excluded.updated_at
WHERE r.delivered_seq < excluded.delivered_seq
RETURNING r.delivered_seq, r.read_seq

-- name: read
INSERT INTO plain_receipt AS r (conversation_id, user_id, read_seq, updated_at)
VALUES ($1, $2, $3, now())
ON CONFLICT (conversation_id, user_id) DO UPDATE
SET read_seq = excluded.read_seq, updated_at = excluded.updated_at
WHERE r.read_seq < excluded.read_seq
RETURNING r.delivered_seq, r.read_seq
