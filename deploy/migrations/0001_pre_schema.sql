-- migrate:up

-- A random id of this store: every restore must change it (UPDATE store SET incarnation = gen_random_uuid()).
CREATE TABLE store (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    incarnation uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO store DEFAULT VALUES;

-- Its row lock orders the writers of a conversation. fillfactor leaves room for in-page updates of last_seq.
CREATE TABLE conversation (
    conversation_id uuid PRIMARY KEY,
    shard smallint NOT NULL CHECK (shard BETWEEN 0 AND 63),
    kind text NOT NULL CHECK (kind IN ('direct', 'group')),
    title text,
    history text NOT NULL CHECK (history IN ('joined', 'all')),
    creator_id text COLLATE "C" NOT NULL,
    last_seq bigint NOT NULL CHECK (last_seq > 0),
    created_at timestamptz NOT NULL,
    changed_xid xid8 NOT NULL DEFAULT pg_current_xact_id()
) WITH (fillfactor = 70);

-- visible: what of the timeline this user may read; its last range is open while the user is a member.
CREATE TABLE member (
    conversation_id uuid NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    role text NOT NULL CHECK (role IN ('admin', 'member')),
    visible int8multirange NOT NULL CHECK (NOT isempty(visible)),
    changed_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (conversation_id, user_id)
);
CREATE INDEX member_by_user ON member (user_id, conversation_id);

-- body holds the client's own bytes. digest is what sameness of a repeated client_msg_id is judged by: it outlives
-- edit, recall and delete. edited_by, recalled_by, deleted_by: seq of the newest change of this event.
CREATE TABLE event (
    conversation_id uuid NOT NULL,
    seq bigint NOT NULL CHECK (seq > 0),
    event_id uuid NOT NULL UNIQUE,
    type text NOT NULL CHECK (type IN ('message', 'edit', 'recall', 'delete', 'member', 'conversation', 'system')),
    sender_id text COLLATE "C" NOT NULL,
    client_msg_id text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,
    body json,
    target_seq bigint,
    edited_by bigint,
    recalled_by bigint,
    deleted_by bigint,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (conversation_id, seq),
    UNIQUE (conversation_id, sender_id, client_msg_id)
);
CREATE INDEX event_edits ON event (conversation_id, target_seq, seq) WHERE type = 'edit';
CREATE INDEX event_titles ON event (conversation_id, seq) WHERE type = 'conversation';

-- The outbox is an append-only log: never updated, read by id above a cursor per shard. No foreign key (one was seen
-- to deadlock), and the id is drawn one by one under the shard's lock (a sequence cache was seen to lose rows).
CREATE SEQUENCE outbox_id_seq AS bigint CACHE 1;
CREATE TABLE outbox (
    shard smallint NOT NULL,
    id bigint NOT NULL DEFAULT nextval('outbox_id_seq'),
    conversation_id uuid NOT NULL,
    seq bigint,                             -- null for receipts, which have no place in the timeline
    event_id uuid NOT NULL,
    topic text NOT NULL,                    -- without the prefix: 'events.v1', 'receipts.v1'
    type text NOT NULL,                     -- ce_type
    source text NOT NULL,                   -- ce_source
    headers text[] NOT NULL DEFAULT '{}',   -- further headers: name, value, name, value …
    payload bytea NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (shard, id)
) PARTITION BY RANGE (id);
DO $$
BEGIN
    FOR part IN 0..15 LOOP
        EXECUTE format(
            'CREATE TABLE outbox_p%s PARTITION OF outbox FOR VALUES FROM (%s) TO (%s)',
            part, part * (1::bigint << 26), (part + 1) * (1::bigint << 26));
    END LOOP;
END $$;

-- Lease rows, not session locks: they survive a connection pooler and can be read in SQL. Each takeover raises epoch.
CREATE TABLE outbox_shard (
    shard smallint PRIMARY KEY CHECK (shard BETWEEN 0 AND 63),
    owner text,
    epoch bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    cursor_id bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
INSERT INTO outbox_shard (shard) SELECT generate_series(0, 63);

-- A row per batch that Kafka confirmed. The offset of a row is base_offset plus its rank among the batch's rows.
CREATE TABLE outbox_delivery (
    shard smallint NOT NULL,
    from_id bigint NOT NULL,
    to_id bigint NOT NULL,
    topic text NOT NULL,
    partition int NOT NULL,
    base_offset bigint NOT NULL,
    owner text NOT NULL,
    epoch bigint NOT NULL,
    acked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX outbox_delivery_by_id ON outbox_delivery (shard, to_id, topic);

-- delivered: the union of what the user's devices hold. delivered_seq, and the pair (read_version, read_seq), only rise.
CREATE TABLE receipt (
    conversation_id uuid NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    delivered int8multirange NOT NULL DEFAULT '{}',
    delivered_seq bigint NOT NULL DEFAULT 0,
    read_seq bigint NOT NULL DEFAULT 0,
    read_version bigint NOT NULL DEFAULT 0,
    changed_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (conversation_id, user_id)
) WITH (fillfactor = 70);

CREATE TABLE device_cursor (
    conversation_id uuid NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    delivered int8multirange NOT NULL DEFAULT '{}',
    PRIMARY KEY (conversation_id, user_id, device_id)
) WITH (fillfactor = 70);

-- The next offset to apply of each partition of acks, moved in the transaction that applies them.
CREATE TABLE ack_offset (
    topic text NOT NULL,
    partition int NOT NULL,
    cluster_id text NOT NULL,
    next bigint NOT NULL,
    PRIMARY KEY (topic, partition, cluster_id)
);

-- migrate:down
