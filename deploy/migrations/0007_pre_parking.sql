-- migrate:up

-- Why a shard stands still, set by the relay that holds it and kept over take-overs; null while it moves.
ALTER TABLE outbox_shard ADD COLUMN stopped_at timestamptz, ADD COLUMN stopped_reason text;

-- Rows of the outbox that left the straight way: refused by Kafka ('failed'), or waiting behind such a row of their
-- conversation and topic ('waiting'). Both are open; the open rows of a conversation and topic are a queue in the order
-- of ids, and its first row alone has a retry_at. A settled row ('sent', 'dead') stays as long as its outbox row:
-- deliveries count it out (outbox_state).
CREATE TABLE outbox_parked (
    shard smallint NOT NULL,
    id bigint NOT NULL,
    conversation_id uuid NOT NULL,
    topic text NOT NULL,
    event_id uuid NOT NULL,
    state text NOT NULL CHECK (state IN ('waiting', 'failed', 'sent', 'dead')),
    attempts int NOT NULL DEFAULT 0,
    retry_at timestamptz,
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    settled_at timestamptz,
    kafka_offset bigint,                    -- of a sent row, in the partition of its shard's number
    PRIMARY KEY (shard, id)
) WITH (fillfactor = 70);
-- No index holds a topic, which nothing bounds: a row that no index takes could not be parked, and would hold up all others.
CREATE INDEX outbox_parked_queue ON outbox_parked (shard, conversation_id, id) WHERE state IN ('waiting', 'failed');
CREATE INDEX outbox_parked_due ON outbox_parked (shard, retry_at) WHERE retry_at IS NOT NULL;

-- Every attempt to publish a row that was refused once; error is null for the one that succeeded.
CREATE TABLE outbox_attempt (
    shard smallint NOT NULL,
    id bigint NOT NULL,
    attempt int NOT NULL CHECK (attempt > 0),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    error text,
    owner text NOT NULL,
    epoch bigint NOT NULL,
    PRIMARY KEY (shard, id, attempt)
);

-- Records that were given up, each with all that is needed to publish it once more or to judge it: it outlives the outbox.
-- origin: 'outbox', or the topic that a consumer read it from. passed: a later record of its conversation and topic may
-- be in Kafka, so that a retry comes late.
CREATE TABLE dead_letter (
    dead_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    origin text NOT NULL,
    shard smallint NOT NULL,
    outbox_id bigint,
    conversation_id uuid NOT NULL,
    seq bigint,
    event_id uuid NOT NULL,
    topic text NOT NULL,
    type text NOT NULL,
    source text NOT NULL,
    headers text[] NOT NULL,
    payload bytea NOT NULL,
    created_at timestamptz NOT NULL,
    state text NOT NULL CHECK (state IN ('dead', 'retrying', 'sent', 'discarded', 'rewound')),
    attempts int NOT NULL,
    error text NOT NULL,
    died_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    passed boolean NOT NULL DEFAULT false,
    redriven_at timestamptz,
    settled_at timestamptz,
    kafka_offset bigint,
    UNIQUE (shard, outbox_id)
);
CREATE INDEX dead_letter_open ON dead_letter (shard, died_at, dead_id) WHERE state IN ('dead', 'retrying');
CREATE INDEX dead_letter_by_conversation ON dead_letter (conversation_id, outbox_id);
CREATE INDEX dead_letter_by_event ON dead_letter (event_id);
CREATE INDEX dead_letter_by_death ON dead_letter (died_at, dead_id);
CREATE INDEX dead_letter_redriven ON dead_letter (redriven_at) WHERE redriven_at IS NOT NULL;
CREATE VIEW outbox_dead AS SELECT * FROM dead_letter WHERE origin = 'outbox';

-- Who did what to a dead letter, and why.
CREATE TABLE dead_letter_action (
    dead_id bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    action text NOT NULL CHECK (action IN ('retry', 'redrive', 'discard', 'rewind')),
    who text NOT NULL,
    reason text
);
CREATE INDEX dead_letter_action_by_letter ON dead_letter_action (dead_id, at);

-- Copies rows that were just declared dead. A row dies a second time after a rewind.
CREATE FUNCTION bury_parked(p_shard smallint, p_ids bigint[]) RETURNS void LANGUAGE sql AS $$
    INSERT INTO dead_letter AS d (
        origin, shard, outbox_id, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at, state,
        attempts, error)
    SELECT 'outbox', o.shard, o.id, o.conversation_id, o.seq, o.event_id, o.topic, o.type, o.source, o.headers, o.payload,
           o.created_at, 'dead', p.attempts, a.error
    FROM unnest(p_ids) AS t (id)
    JOIN outbox_parked AS p ON p.shard = p_shard AND p.id = t.id AND p.state = 'dead'
    JOIN outbox AS o ON o.shard = p_shard AND o.id = t.id
    JOIN outbox_attempt AS a ON a.shard = p_shard AND a.id = t.id AND a.attempt = p.attempts
    ON CONFLICT (shard, outbox_id) DO UPDATE
    SET state = 'dead', attempts = excluded.attempts, error = excluded.error, died_at = excluded.died_at, passed = false,
        settled_at = NULL, kafka_offset = NULL;
$$;

-- Moves a shard's cursor past rows of which some were parked (outcome 'failed', 'waiting' or 'dead'), and keeps where
-- the others went. False if another relay holds the shard by now: nothing is changed then. Safe to repeat.
CREATE FUNCTION park_rows(
    p_owner text, p_epoch bigint, p_shard smallint, p_to_id bigint,
    p_from_ids bigint[], p_to_ids bigint[], p_topics text[], p_offsets bigint[],
    p_ids bigint[], p_conversations uuid[], p_parked_topics text[], p_event_ids uuid[], p_outcomes text[],
    p_errors text[], p_waits_ms bigint[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_cursor bigint;
    v_dead bigint[];
BEGIN
    SELECT cursor_id INTO v_cursor FROM outbox_shard
    WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch AND cursor_id <= p_to_id
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE outbox_shard SET cursor_id = p_to_id WHERE shard = p_shard;

    INSERT INTO outbox_delivery (shard, from_id, to_id, topic, partition, base_offset, owner, epoch)
    SELECT p_shard, d.from_id, d.to_id, d.topic, p_shard, d.base_offset, p_owner, p_epoch
    FROM unnest(p_from_ids, p_to_ids, p_topics, p_offsets) AS d (from_id, to_id, topic, base_offset)
    WHERE d.to_id > v_cursor;

    WITH parked AS (
        INSERT INTO outbox_parked (shard, id, conversation_id, topic, event_id, state, attempts, retry_at, settled_at)
        SELECT p_shard, t.id, t.conversation_id, t.topic, t.event_id, t.outcome, (t.error IS NOT NULL)::int,
               CASE t.outcome WHEN 'failed' THEN clock_timestamp() + t.wait_ms * interval '1 millisecond' END,
               CASE t.outcome WHEN 'dead' THEN clock_timestamp() END
        FROM unnest(p_ids, p_conversations, p_parked_topics, p_event_ids, p_outcomes, p_errors, p_waits_ms)
            AS t (id, conversation_id, topic, event_id, outcome, error, wait_ms)
        ON CONFLICT (shard, id) DO NOTHING
        RETURNING id, state
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE state = 'dead'), '{}') INTO v_dead FROM parked;

    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    SELECT p_shard, t.id, 1, left(t.error, 1000), p_owner, p_epoch
    FROM unnest(p_ids, p_errors) AS t (id, error)
    WHERE t.error IS NOT NULL
    ON CONFLICT (shard, id, attempt) DO NOTHING;

    IF cardinality(v_dead) > 0 THEN
        PERFORM bury_parked(p_shard, v_dead);
        -- Nothing waits behind them.
        UPDATE dead_letter SET passed = true WHERE shard = p_shard AND outbox_id = ANY (v_dead);
    END IF;
    RETURN true;
END $$;

-- Writes down what became of open rows of one queue ('sent', 'failed' or 'dead'); the first row that is left is due at
-- once unless it waits for its own time. p_attempts: how often each had been tried before, so that what is told twice
-- counts once. Returns how many are left, or null if another relay holds the shard by now: nothing is changed then.
CREATE FUNCTION settle_parked(
    p_owner text, p_epoch bigint, p_shard smallint, p_conversation uuid, p_topic text,
    p_ids bigint[], p_attempts int[], p_outcomes text[], p_offsets bigint[], p_errors text[], p_waits_ms bigint[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_dead bigint[];
    v_left bigint;
    v_first bigint;
BEGIN
    PERFORM FROM outbox_shard WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;

    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    SELECT p_shard, t.id, p.attempts + 1, left(t.error, 1000), p_owner, p_epoch
    FROM unnest(p_ids, p_attempts, p_errors) AS t (id, attempts, error)
    JOIN outbox_parked AS p
        ON p.shard = p_shard AND p.id = t.id AND p.attempts = t.attempts AND p.state IN ('waiting', 'failed')
    ON CONFLICT (shard, id, attempt) DO NOTHING;

    WITH settled AS (
        UPDATE outbox_parked AS p
        SET state = t.outcome,
            attempts = p.attempts + 1,
            kafka_offset = t.kafka_offset,
            retry_at = CASE t.outcome WHEN 'failed' THEN clock_timestamp() + t.wait_ms * interval '1 millisecond' END,
            settled_at = CASE t.outcome WHEN 'failed' THEN NULL ELSE clock_timestamp() END
        FROM unnest(p_ids, p_attempts, p_outcomes, p_offsets, p_waits_ms)
            AS t (id, attempts, outcome, kafka_offset, wait_ms)
        WHERE p.shard = p_shard AND p.id = t.id AND p.attempts = t.attempts AND p.state IN ('waiting', 'failed')
        RETURNING p.id, p.state
    )
    SELECT coalesce(array_agg(id) FILTER (WHERE state = 'dead'), '{}') INTO v_dead FROM settled;
    -- What is told twice must not undo what somebody did to the letter in between.
    PERFORM bury_parked(p_shard, v_dead);

    SELECT count(*), min(id) INTO v_left, v_first FROM outbox_parked
    WHERE shard = p_shard AND conversation_id = p_conversation AND topic = p_topic AND state IN ('waiting', 'failed');
    UPDATE outbox_parked SET retry_at = clock_timestamp() WHERE shard = p_shard AND id = v_first AND retry_at IS NULL;

    -- A letter stays in its place while every row behind it waits; the queue's end lets later rows go out unseen.
    UPDATE dead_letter SET passed = true
    WHERE conversation_id = p_conversation AND topic = p_topic AND shard = p_shard AND NOT passed
        AND (v_left = 0
             OR outbox_id < (SELECT max(t.id) FROM unnest(p_ids, p_outcomes) AS t (id, outcome) WHERE t.outcome = 'sent'));
    RETURN v_left;
END $$;

-- Writes down what became of a letter that was tried again: sent to an offset, or refused with an error. p_attempts: how
-- often it had been tried before, so that what is told twice ends no later try. False if it is not this relay's to say.
CREATE FUNCTION settle_letter(
    p_owner text, p_epoch bigint, p_shard smallint, p_dead_id bigint, p_attempts int, p_offset bigint, p_error text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_letter dead_letter;
BEGIN
    PERFORM FROM outbox_shard WHERE shard = p_shard AND owner = p_owner AND epoch = p_epoch FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE dead_letter AS d
    SET state = CASE WHEN p_error IS NULL THEN 'sent' ELSE 'dead' END,
        attempts = d.attempts + 1,
        error = coalesce(left(p_error, 1000), d.error),
        settled_at = CASE WHEN p_error IS NULL THEN clock_timestamp() END,
        kafka_offset = p_offset
    WHERE d.dead_id = p_dead_id AND d.shard = p_shard AND d.state = 'retrying' AND d.attempts = p_attempts
    RETURNING * INTO v_letter;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO outbox_attempt (shard, id, attempt, error, owner, epoch)
    VALUES (p_shard, v_letter.outbox_id, v_letter.attempts, left(p_error, 1000), p_owner, p_epoch);
    IF p_error IS NULL THEN
        UPDATE outbox_parked SET state = 'sent', kafka_offset = p_offset, settled_at = clock_timestamp()
        WHERE shard = p_shard AND id = v_letter.outbox_id AND state = 'dead';
        UPDATE dead_letter SET passed = true
        WHERE conversation_id = v_letter.conversation_id AND topic = v_letter.topic AND shard = p_shard
            AND outbox_id < v_letter.outbox_id AND NOT passed;
    END IF;
    RETURN true;
END $$;

-- Publishes a shard again from an id on. The shard is free then, so that whoever held it is fenced and reads it
-- anew; what was noted of rows from
-- there on is forgotten, since it is about to happen again. Returns the cursor before. Errors: 'P0001' with what is wrong.
CREATE FUNCTION rewind_shard(p_shard smallint, p_id bigint, p_who text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    v_cursor bigint;
    v_first bigint;
BEGIN
    SELECT cursor_id INTO v_cursor FROM outbox_shard WHERE shard = p_shard FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no shard %', p_shard;
    END IF;
    IF p_id > v_cursor THEN
        RAISE EXCEPTION 'shard % has published up to id % only', p_shard, v_cursor;
    END IF;
    SELECT min(id) INTO v_first FROM outbox WHERE shard = p_shard;
    IF v_first IS NULL THEN
        RAISE EXCEPTION 'the outbox of shard % is empty', p_shard;
    END IF;
    IF p_id < v_first THEN
        RAISE EXCEPTION 'the outbox of shard % begins at id %', p_shard, v_first;
    END IF;
    UPDATE outbox_shard SET cursor_id = p_id - 1, owner = NULL, lease_until = NULL WHERE shard = p_shard;

    DELETE FROM outbox_delivery WHERE shard = p_shard AND to_id >= p_id AND from_id >= p_id;
    UPDATE outbox_delivery SET to_id = p_id - 1 WHERE shard = p_shard AND to_id >= p_id;
    -- A queue of which nothing is open any more lets later rows go out, and may be another one when it is parked again.
    WITH forgotten AS (
        DELETE FROM outbox_parked WHERE shard = p_shard AND id >= p_id
        RETURNING conversation_id, topic, state
    )
    UPDATE dead_letter AS d SET passed = true
    FROM (SELECT DISTINCT conversation_id, topic FROM forgotten WHERE state IN ('waiting', 'failed')) AS q
    WHERE d.conversation_id = q.conversation_id AND d.topic = q.topic AND d.shard = p_shard AND d.outbox_id < p_id
        AND NOT d.passed AND NOT EXISTS (
            SELECT FROM outbox_parked AS p
            WHERE p.shard = p_shard AND p.conversation_id = q.conversation_id AND p.topic = q.topic AND p.id < p_id
                AND p.state IN ('waiting', 'failed'));
    DELETE FROM outbox_attempt WHERE shard = p_shard AND id >= p_id;
    WITH again AS (
        UPDATE dead_letter SET state = 'rewound', settled_at = clock_timestamp()
        WHERE shard = p_shard AND outbox_id >= p_id AND state IN ('dead', 'retrying')
        RETURNING dead_id
    )
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'rewind', p_who FROM again;
    RETURN v_cursor;
END $$;

-- Lets a stopped shard go on; whether it stood still. It is free then, so that whoever held it begins anew.
CREATE FUNCTION resume_shard(p_shard smallint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    UPDATE outbox_shard SET stopped_at = NULL, stopped_reason = NULL, owner = NULL, lease_until = NULL
    WHERE shard = p_shard AND stopped_reason IS NOT NULL;
    RETURN FOUND;
END $$;

-- Asks for dead letters to be tried again, the oldest first, each once since p_since and at most p_cap of them since then.
-- Returns how many. The lock keeps several relays from counting at the same time.
CREATE FUNCTION redrive_letters(p_since timestamptz, p_cap int, p_who text) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    v_count int;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('waybill redrive'));
    WITH picked AS (
        SELECT dead_id FROM dead_letter
        WHERE state = 'dead' AND origin = 'outbox' AND died_at < p_since AND (redriven_at IS NULL OR redriven_at < p_since)
        ORDER BY died_at, dead_id
        LIMIT greatest(0, p_cap - (SELECT count(*) FROM dead_letter WHERE redriven_at >= p_since))
    ), locked AS (
        SELECT d.dead_id FROM dead_letter AS d JOIN picked ON picked.dead_id = d.dead_id
        WHERE d.state = 'dead'
        ORDER BY d.dead_id
        FOR UPDATE OF d
    ), asked AS (
        UPDATE dead_letter AS d SET state = 'retrying', redriven_at = clock_timestamp()
        FROM locked WHERE d.dead_id = locked.dead_id
        RETURNING d.dead_id
    )
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'redrive', p_who FROM asked;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

REVOKE EXECUTE ON FUNCTION bury_parked, park_rows, settle_parked, settle_letter, redrive_letters, rewind_shard, resume_shard
FROM PUBLIC;
GRANT EXECUTE ON FUNCTION bury_parked, park_rows, settle_parked, settle_letter, redrive_letters TO waybill_relay;
GRANT EXECUTE ON FUNCTION rewind_shard, resume_shard TO waybill_console;

GRANT SELECT, INSERT, UPDATE ON outbox_parked TO waybill_relay;
GRANT SELECT, INSERT ON outbox_attempt TO waybill_relay;
GRANT SELECT, INSERT ON dead_letter TO waybill_relay;
GRANT UPDATE (state, attempts, error, died_at, passed, redriven_at, settled_at, kafka_offset) ON dead_letter TO waybill_relay;
GRANT INSERT ON dead_letter_action TO waybill_relay;
GRANT SELECT ON outbox_parked, outbox_attempt, dead_letter, outbox_dead, dead_letter_action TO waybill_console;
GRANT UPDATE (state, settled_at) ON dead_letter TO waybill_console;
GRANT INSERT ON dead_letter_action TO waybill_console;

-- People's commands write now: one that hangs must not keep a letter or a shard from the relay.
ALTER ROLE waybill_console SET statement_timeout = '30s';
ALTER ROLE waybill_console SET lock_timeout = '3s';
ALTER ROLE waybill_console SET transaction_timeout = '30s';
ALTER ROLE waybill_console SET idle_in_transaction_session_timeout = '3s';
ALTER ROLE waybill_console SET tcp_user_timeout = '5s';

-- migrate:down
