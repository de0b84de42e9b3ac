-- migrate:up transaction:false

-- Each part is a transaction of its own and may be run again: no lock of one part is held during another.

-- For migrations: changes a table that others use, in the short moments in which nobody holds its lock. Nobody has to wait
-- behind it for long, and who holds the lock for long makes it fail; then it can be run again.
BEGIN;
CREATE OR REPLACE FUNCTION alter_patiently(p_table text, p_statements text) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '200ms' AS $$
BEGIN
    FOR try IN 1..100 LOOP
        BEGIN
            EXECUTE p_statements;
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.2 * random());
        END;
    END LOOP;
    RAISE lock_not_available USING MESSAGE = p_table || ' is locked by somebody for long: migrate again later';
END $$;
REVOKE EXECUTE ON FUNCTION alter_patiently FROM PUBLIC;
COMMIT;

-- The device that a send came from, where its writer knows it.
BEGIN;
SELECT alter_patiently('outbox', $alter$
    ALTER TABLE outbox ADD COLUMN IF NOT EXISTS device_id text;
$alter$);
COMMIT;

-- How many members a group has now, counted when somebody is added for the first time; null until then. From here on
-- every change of `member` moves it, whichever version of a writer makes it.
BEGIN;
CREATE OR REPLACE FUNCTION count_joined() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE conversation AS c
    SET members = c.members + d.amount
    FROM (
        SELECT a.conversation_id, count(*) AS amount FROM added AS a WHERE upper_inf(a.visible) GROUP BY a.conversation_id
    ) AS d
    WHERE c.conversation_id = d.conversation_id AND c.members IS NOT NULL;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION count_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE conversation AS c
    SET members = c.members + d.amount
    FROM (
        SELECT b.conversation_id, sum(b.amount) AS amount
        FROM (
            SELECT o.conversation_id, -upper_inf(o.visible)::int AS amount FROM before AS o
            UNION ALL
            SELECT n.conversation_id, upper_inf(n.visible)::int FROM after AS n
        ) AS b
        GROUP BY b.conversation_id
        HAVING sum(b.amount) <> 0
    ) AS d
    WHERE c.conversation_id = d.conversation_id AND c.members IS NOT NULL;
    RETURN NULL;
END $$;

SELECT alter_patiently('conversation', $alter$
    ALTER TABLE conversation ADD COLUMN IF NOT EXISTS members int;
    -- Before the triggers, which run as whoever writes.
    GRANT UPDATE (members) ON conversation TO waybill_ingest;
    CREATE OR REPLACE TRIGGER count_joined
    AFTER INSERT ON member REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION count_joined();
    CREATE OR REPLACE TRIGGER count_changed
    AFTER UPDATE ON member REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION count_changed();
$alter$);
COMMIT;

-- What was erased, for good, and why: 'delete' (somebody deleted from_seq), or 'retention'. events: how many bodies. xid
-- tells which vacuum has taken the old versions of the rows away.
BEGIN;
CREATE TABLE IF NOT EXISTS erasure (
    erasure_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    conversation_id uuid NOT NULL,
    from_seq bigint NOT NULL,
    to_seq bigint NOT NULL,
    events int NOT NULL,
    cause text NOT NULL CHECK (cause IN ('delete', 'retention')),
    xid xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX IF NOT EXISTS erasure_by_conversation ON erasure (conversation_id, erasure_id);
CREATE INDEX IF NOT EXISTS erasure_by_xid ON erasure (xid);

-- The old versions of all rows that were erased in transactions before `upto` are gone.
CREATE TABLE IF NOT EXISTS erasure_vacuum (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    upto xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO erasure_vacuum DEFAULT VALUES ON CONFLICT DO NOTHING;

-- After which age bodies are erased: of a conversation, or (null) of every one that has no row of its own. age null: kept.
CREATE TABLE IF NOT EXISTS retention_policy (
    conversation_id uuid UNIQUE NULLS NOT DISTINCT,
    age interval CHECK (age >= '1 minute'),
    set_by text NOT NULL,
    set_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Up to which seq a conversation has been gone through. The rounds go through conversations in the order of ids: position
-- is the last one done, null between two rounds.
CREATE TABLE IF NOT EXISTS retention_progress (
    conversation_id uuid PRIMARY KEY,
    upto bigint NOT NULL
) WITH (fillfactor = 70);
CREATE TABLE IF NOT EXISTS retention_round (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    position uuid,
    begun_at timestamptz NOT NULL DEFAULT '-infinity',
    ended_at timestamptz
) WITH (fillfactor = 50);
INSERT INTO retention_round DEFAULT VALUES ON CONFLICT DO NOTHING;
COMMIT;

-- Parked rows by their event, for those that may still be published.
BEGIN;
CREATE INDEX IF NOT EXISTS outbox_parked_by_event ON outbox_parked (event_id) WHERE state <> 'sent';
COMMIT;

BEGIN;

-- As the one before, with `expired`: the body is gone by age, and nobody has deleted it.
CREATE OR REPLACE FUNCTION event_frame(
    conversation_id uuid, seq bigint, event_id uuid, type text, sender_id text, client_msg_id text, body text,
    target_seq bigint, created_at timestamptz, edited_by bigint, recalled_by bigint, deleted_by bigint, expired boolean
) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN '{"t":"event","conversation_id":"' || conversation_id || '","seq":' || seq || ',"event_id":"' || event_id
    || '","type":"' || type || '","sender_id":"' || sender_id || '","client_msg_id":"' || client_msg_id
    || '","body":' || coalesce(body, 'null')
    || coalesce(',"target_seq":' || target_seq, '')
    || ',"created_at":"' || wire_time(created_at) || '"'
    || coalesce(',"edited_by":' || edited_by, '')
    || coalesce(',"recalled_by":' || recalled_by, '')
    || coalesce(',"deleted_by":' || deleted_by, '')
    || CASE WHEN expired THEN ',"expired":true}' ELSE '}' END;

-- Types whose events always have a body when they are written: one that has none was erased.
CREATE OR REPLACE FUNCTION has_text(type text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN type IN ('message', 'edit', 'system');

CREATE OR REPLACE FUNCTION present_frame(e event, visible int8multirange) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT event_frame(
        e.conversation_id, e.seq, e.event_id, e.type, e.sender_id, e.client_msg_id,
        CASE WHEN s.is_shown THEN s.body END,
        e.target_seq, e.created_at, s.edited_by, e.recalled_by, e.deleted_by,
        s.is_shown AND s.body IS NULL AND has_text(e.type))
    FROM (
        SELECT CASE WHEN e.recalled_by IS NOT NULL OR e.deleted_by IS NOT NULL THEN false
                    WHEN e.type = 'edit' THEN coalesce((
                        SELECT t.recalled_by IS NULL AND t.deleted_by IS NULL FROM event AS t
                        WHERE t.conversation_id = e.conversation_id AND t.seq = e.target_seq AND t.seq <@ visible), false)
                    ELSE true END AS is_shown,
               coalesce(n.body, e.body::text) AS body, n.seq AS edited_by
        FROM (SELECT) AS one
        LEFT JOIN LATERAL (
            SELECT n.seq, n.body::text AS body FROM event AS n
            WHERE e.edited_by IS NOT NULL AND n.conversation_id = e.conversation_id AND n.target_seq = e.seq
              AND n.type = 'edit' AND n.seq <@ visible
            ORDER BY n.seq DESC LIMIT 1
        ) AS n ON true
    ) AS s;
END;

CREATE OR REPLACE FUNCTION timeline_after(conversation uuid, visible int8multirange, after bigint, up_to int)
RETURNS TABLE (seq bigint, type text, target_seq bigint, frame text)
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT p.seq, p.type, p.target_seq,
        event_frame(
            p.conversation_id, p.seq, p.event_id, p.type, p.sender_id, p.client_msg_id,
            CASE WHEN p.recalled_by IS NULL AND p.deleted_by IS NULL AND (p.type <> 'edit' OR t.is_shown)
                 THEN coalesce(n.body, p.body::text) END,
            p.target_seq, p.created_at, n.seq, p.recalled_by, p.deleted_by,
            p.body IS NULL AND n.body IS NULL AND p.recalled_by IS NULL AND p.deleted_by IS NULL
                AND (p.type <> 'edit' OR t.is_shown) AND has_text(p.type))
    FROM (
        SELECT e.*
        FROM unnest(visible) AS r (part)
        CROSS JOIN LATERAL (
            SELECT e.*
            FROM event AS e
            WHERE e.conversation_id = conversation AND e.seq > after
              AND e.seq >= lower(r.part) AND e.seq <= coalesce(upper(r.part) - 1, 9223372036854775807)
            ORDER BY e.seq
            LIMIT up_to
        ) AS e
        ORDER BY e.seq
        LIMIT up_to
    ) AS p
    LEFT JOIN LATERAL (
        SELECT e.seq, e.body::text AS body
        FROM event AS e
        WHERE p.edited_by IS NOT NULL AND e.conversation_id = p.conversation_id AND e.target_seq = p.seq
          AND e.type = 'edit' AND e.seq <@ visible
        ORDER BY e.seq DESC
        LIMIT 1
    ) AS n ON true
    LEFT JOIN LATERAL (
        SELECT e.recalled_by IS NULL AND e.deleted_by IS NULL AS is_shown
        FROM event AS e
        WHERE p.type = 'edit' AND e.conversation_id = p.conversation_id AND e.seq = p.target_seq AND e.seq <@ visible
    ) AS t ON true
    ORDER BY p.seq;
END;

CREATE OR REPLACE FUNCTION timeline_before(conversation uuid, visible int8multirange, before bigint, up_to int)
RETURNS TABLE (seq bigint, frame text)
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT p.seq,
        event_frame(
            p.conversation_id, p.seq, p.event_id, p.type, p.sender_id, p.client_msg_id,
            CASE WHEN p.recalled_by IS NULL AND p.deleted_by IS NULL AND (p.type <> 'edit' OR t.is_shown)
                 THEN coalesce(n.body, p.body::text) END,
            p.target_seq, p.created_at, n.seq, p.recalled_by, p.deleted_by,
            p.body IS NULL AND n.body IS NULL AND p.recalled_by IS NULL AND p.deleted_by IS NULL
                AND (p.type <> 'edit' OR t.is_shown) AND has_text(p.type))
    FROM (
        SELECT e.*
        FROM unnest(visible) AS r (part)
        CROSS JOIN LATERAL (
            SELECT e.*
            FROM event AS e
            WHERE e.conversation_id = conversation AND e.seq < before
              AND e.seq >= lower(r.part) AND e.seq <= coalesce(upper(r.part) - 1, 9223372036854775807)
            ORDER BY e.seq DESC
            LIMIT up_to
        ) AS e
        ORDER BY e.seq DESC
        LIMIT up_to
    ) AS p
    LEFT JOIN LATERAL (
        SELECT e.seq, e.body::text AS body
        FROM event AS e
        WHERE p.edited_by IS NOT NULL AND e.conversation_id = p.conversation_id AND e.target_seq = p.seq
          AND e.type = 'edit' AND e.seq <@ visible
        ORDER BY e.seq DESC
        LIMIT 1
    ) AS n ON true
    LEFT JOIN LATERAL (
        SELECT e.recalled_by IS NULL AND e.deleted_by IS NULL AS is_shown
        FROM event AS e
        WHERE p.type = 'edit' AND e.conversation_id = p.conversation_id AND e.seq = p.target_seq AND e.seq <@ visible
    ) AS t ON true
    ORDER BY p.seq DESC;
END;

-- Takes the bodies out of all copies of these events that may still be published or looked at, dead letters and parked
-- rows, where nobody may read them any more: recalled, deleted, an edit of such a one, or erased. Whoever hides or erases
-- a body calls it, and so does whoever makes a copy: each holds the events' rows (and those that edits aim at) until its
-- commit, in the order of keys, so that of two at the same time the later one sees what the other has done. It can do
-- nothing but that, whoever calls it. Order of locks: events, letters, rows of the outbox.
--
-- It sorts: the settings of the relay's role would have it walk all letters in the order of their ids.
CREATE OR REPLACE FUNCTION erase_copies(p_events uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_sort = on
AS $$
DECLARE
    v_conversation uuid[];
    v_seq bigint[];
    v_hidden uuid[];
    v_payload bytea[];
BEGIN
    SELECT array_agg(e.conversation_id), array_agg(s.seq) INTO v_conversation, v_seq
    FROM unnest(p_events) AS i (event_id)
    JOIN event AS e ON e.event_id = i.event_id
    CROSS JOIN LATERAL (VALUES (e.seq), (CASE e.type WHEN 'edit' THEN e.target_seq END)) AS s (seq)
    WHERE s.seq IS NOT NULL;
    IF v_seq IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM unnest(v_conversation, v_seq) AS k (conversation_id, seq)
    JOIN event AS e ON e.conversation_id = k.conversation_id AND e.seq = k.seq
    ORDER BY e.conversation_id, e.seq
    FOR SHARE OF e;

    SELECT array_agg(e.event_id),
           array_agg(convert_to(event_frame(
               e.conversation_id, e.seq, e.event_id, e.type, e.sender_id, e.client_msg_id, NULL, e.target_seq, e.created_at,
               e.edited_by, e.recalled_by, e.deleted_by, NOT g.is_hidden), 'UTF8'))
    INTO v_hidden, v_payload
    FROM unnest(p_events) AS i (event_id)
    JOIN event AS e ON e.event_id = i.event_id
    LEFT JOIN event AS t ON e.type = 'edit' AND t.conversation_id = e.conversation_id AND t.seq = e.target_seq
    CROSS JOIN LATERAL (
        SELECT num_nonnulls(e.recalled_by, e.deleted_by, t.recalled_by, t.deleted_by) > 0 AS is_hidden
    ) AS g
    WHERE has_text(e.type) AND (g.is_hidden OR e.body IS NULL);
    IF v_hidden IS NULL THEN
        RETURN;
    END IF;

    PERFORM FROM dead_letter AS d WHERE d.event_id = ANY (v_hidden) ORDER BY d.dead_id FOR NO KEY UPDATE;
    UPDATE dead_letter AS d
    SET payload = h.payload
    FROM unnest(v_hidden, v_payload) AS h (event_id, payload)
    WHERE d.event_id = h.event_id AND d.payload <> h.payload;

    UPDATE outbox AS o
    SET payload = h.payload
    FROM unnest(v_hidden, v_payload) AS h (event_id, payload)
    JOIN outbox_parked AS p ON p.event_id = h.event_id AND p.state <> 'sent'
    WHERE o.shard = p.shard AND o.id = p.id AND o.payload <> h.payload;
END $$;

CREATE OR REPLACE FUNCTION erase_copies_of_new() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM erase_copies(array_agg(n.event_id)) FROM made AS n WHERE n.topic = 'events.v1' HAVING count(*) > 0;
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION erase_copies, erase_copies_of_new FROM PUBLIC;
GRANT EXECUTE ON FUNCTION erase_copies TO waybill_ingest, waybill_relay;

COMMIT;

BEGIN;
SELECT alter_patiently('outbox_parked', $alter$
    CREATE OR REPLACE TRIGGER erase_copies
    AFTER INSERT ON outbox_parked REFERENCING NEW TABLE AS made
    FOR EACH STATEMENT EXECUTE FUNCTION erase_copies_of_new();
$alter$);
COMMIT;

BEGIN;
SELECT alter_patiently('dead_letter', $alter$
    CREATE OR REPLACE TRIGGER erase_copies
    AFTER INSERT ON dead_letter REFERENCING NEW TABLE AS made
    FOR EACH STATEMENT EXECUTE FUNCTION erase_copies_of_new();
$alter$);
COMMIT;

BEGIN;

-- As before, and what `recall` and `delete` do to copies. Events are locked in the order of keys, as by whoever erases
-- copies or bodies beside it.
CREATE OR REPLACE FUNCTION apply_changes(
    p_conversation uuid[], p_type text[], p_seq bigint[], p_target bigint[], p_action text[], p_subject text[],
    p_role text[], p_title text[], p_sets_title boolean[]
) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    v_erases boolean := 'delete' = ANY (p_type);
    v_conversation uuid[];
    v_by bigint[];
    v_root bigint[];
    v_seq bigint[];
    v_event_id uuid[];
BEGIN
    IF v_erases OR 'recall' = ANY (p_type) THEN
        -- Edits are few, and none is new while the conversation is locked.
        SELECT array_agg(e.conversation_id), array_agg(i.seq), array_agg(i.target_seq), array_agg(e.seq),
               array_agg(e.event_id)
        INTO v_conversation, v_by, v_root, v_seq, v_event_id
        FROM unnest(p_conversation, p_type, p_seq, p_target) AS i (conversation_id, type, seq, target_seq)
        CROSS JOIN LATERAL (
            SELECT e.conversation_id, e.seq, e.event_id FROM event AS e
            WHERE e.conversation_id = i.conversation_id AND e.seq = i.target_seq
            UNION ALL
            SELECT e.conversation_id, e.seq, e.event_id FROM event AS e
            WHERE e.conversation_id = i.conversation_id AND e.target_seq = i.target_seq AND e.type = 'edit'
        ) AS e
        WHERE i.type IN ('recall', 'delete');
    END IF;
    PERFORM FROM unnest(p_conversation || v_conversation, p_target || v_seq) AS k (conversation_id, seq)
    JOIN event AS e ON e.conversation_id = k.conversation_id AND e.seq = k.seq
    ORDER BY e.conversation_id, e.seq
    FOR NO KEY UPDATE OF e;

    IF v_erases THEN
        WITH gone AS (
            UPDATE event AS e
            SET body = NULL
            FROM unnest(p_conversation, p_type, p_seq) AS i (conversation_id, type, seq)
            JOIN unnest(v_conversation, v_by, v_root, v_seq) AS v (conversation_id, by_seq, root, seq)
                ON v.conversation_id = i.conversation_id AND v.by_seq = i.seq
            WHERE i.type = 'delete' AND e.conversation_id = v.conversation_id AND e.seq = v.seq AND e.body IS NOT NULL
            RETURNING e.conversation_id, e.seq, v.root, v.by_seq
        ), noted AS (
            INSERT INTO erasure (conversation_id, from_seq, to_seq, events, cause)
            SELECT g.conversation_id, min(g.seq), max(g.seq), count(*), 'delete'
            FROM gone AS g
            GROUP BY g.conversation_id
            ORDER BY g.conversation_id
        )
        INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, user_id, detail)
        SELECT g.root, g.root, g.conversation_id, 'ingest', 'erased', 'delete', d.sender_id,
               json_build_object('by', g.by_seq, 'bodies', count(*))
        FROM gone AS g
        JOIN event AS d ON d.conversation_id = g.conversation_id AND d.seq = g.by_seq
        GROUP BY g.conversation_id, g.root, g.by_seq, d.sender_id;
    END IF;
    UPDATE event AS e
    SET edited_by = CASE i.type WHEN 'edit' THEN i.seq ELSE e.edited_by END,
        recalled_by = CASE i.type WHEN 'recall' THEN i.seq ELSE e.recalled_by END,
        deleted_by = CASE i.type WHEN 'delete' THEN i.seq ELSE e.deleted_by END
    FROM unnest(p_conversation, p_type, p_seq, p_target) AS i (conversation_id, type, seq, target_seq)
    WHERE i.type IN ('edit', 'recall', 'delete')
      AND e.conversation_id = i.conversation_id AND e.seq = i.target_seq;
    IF v_event_id IS NOT NULL THEN
        PERFORM erase_copies(v_event_id);
    END IF;

    UPDATE conversation AS c
    SET title = i.title
    FROM unnest(p_conversation, p_type, p_title, p_sets_title) AS i (conversation_id, type, title, sets_title)
    WHERE i.type = 'conversation' AND i.sets_title AND c.conversation_id = i.conversation_id;

    INSERT INTO member AS m (conversation_id, user_id, role, visible)
    SELECT i.conversation_id, i.subject, coalesce(i.role, 'member'),
           int8multirange(int8range(CASE c.history WHEN 'all' THEN 1 ELSE i.seq END, NULL))
    FROM unnest(p_conversation, p_type, p_seq, p_action, p_subject, p_role)
        AS i (conversation_id, type, seq, action, subject, role)
    JOIN conversation AS c ON c.conversation_id = i.conversation_id
    WHERE i.type = 'member' AND i.action = 'add'
    ORDER BY i.conversation_id, i.subject
    ON CONFLICT (conversation_id, user_id) DO UPDATE
    SET visible = m.visible + excluded.visible, role = excluded.role, changed_xid = pg_current_xact_id();

    UPDATE member AS m
    SET visible = CASE WHEN i.action = 'role' THEN m.visible
                       ELSE m.visible * int8multirange(int8range(NULL, i.seq, '(]')) END,
        role = CASE WHEN i.action = 'role' THEN i.role ELSE m.role END,
        changed_xid = pg_current_xact_id()
    FROM unnest(p_conversation, p_type, p_seq, p_action, p_subject, p_role)
        AS i (conversation_id, type, seq, action, subject, role)
    WHERE i.type = 'member' AND i.action IN ('remove', 'leave', 'role')
      AND m.conversation_id = i.conversation_id AND m.user_id = i.subject;
END $$;

-- Writes a batch of events, or with p_write = false only says what it would refuse.
--
-- Arrays run in parallel, one element per event, in the order of arrival. p_as_service: written by a service, which
-- may write `system` events and needs no member for them. p_action, p_subject, p_role: of a `member` event; p_title
-- and p_sets_title: of a `conversation` event. p_device: what it came from, or null. p_refused: a refusal from outside,
-- the last one that counts, or null. A conversation with an event other than `message` and `system` in the batch must
-- have no second event in it, since such an event changes what the next one may do.
--
-- p_edit_window, p_recall_window: so many seconds an event's sender may edit it, or recall and delete it; null: for ever.
-- Admins of the group may recall and delete at any time. p_group_size: no member is added beyond it; null: no limit.
--
-- Returns a row per event: outcome is 'new', 'duplicate' or the name of a refusal (services/ingest/admission.py). With
-- p_write = false, copies of one client id within the batch are all 'new'. All that is not 'new' is noted in `transition`.
--
-- Each step is a statement of its own: in READ COMMITTED a statement that waited for a row lock goes on reading the
-- other tables in its old snapshot. The function is called as a statement by itself, so that no client round trip lies
-- between its first lock and its commit. Order of locks, the same for every writer: conversations, events, members, shards.
--
-- The planner settings below hold every look-up to its index: plans live as long as a connection, and one that was
-- made while a table was small would read the whole of it when it has grown.
CREATE OR REPLACE FUNCTION append_events(
    p_conversation uuid[], p_sender text[], p_client_msg_id text[], p_type text[], p_digest bytea[], p_body text[],
    p_target bigint[], p_as_service boolean[], p_action text[], p_subject text[], p_role text[], p_title text[],
    p_sets_title boolean[], p_traceparent text[], p_device text[], p_refused text[], p_edit_window float8,
    p_recall_window float8, p_group_size int, p_write boolean
) RETURNS TABLE (outcome text, seq bigint, event_id uuid, created_at timestamptz)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
AS $$
#variable_conflict use_column
DECLARE
    v_locked int;
    v_found int;
    v_shard smallint[];    -- of each event's conversation; null if there is none
    v_kind text[];
    v_head bigint[];
    v_first int[];         -- the event of this batch that has this client id; null if it is known already or refused
    v_outcome text[];      -- null: may be written
    v_seq bigint[];
    v_event_id uuid[];
    v_created_at timestamptz[];
    v_now timestamptz;
    v_edit_from timestamptz;
    v_recall_from timestamptz;
    v_all_new boolean;
    v_crossed uuid[];      -- whose head has gone over a bucket's end, with the heads before and after
    v_heads_before bigint[];
    v_heads_after bigint[];
BEGIN
    -- 1. One writer per conversation from here on. One that was made between the two statements is not locked yet.
    LOOP
        IF p_write THEN
            PERFORM FROM conversation AS c
            WHERE c.conversation_id = ANY (p_conversation)
            ORDER BY c.conversation_id
            FOR NO KEY UPDATE;
            GET DIAGNOSTICS v_locked = ROW_COUNT;
        END IF;
        SELECT count(DISTINCT c.conversation_id), array_agg(c.shard ORDER BY i.ord), array_agg(c.kind ORDER BY i.ord),
               array_agg(c.last_seq ORDER BY i.ord)
        INTO v_found, v_shard, v_kind, v_head
        FROM unnest(p_conversation) WITH ORDINALITY AS i (conversation_id, ord)
        LEFT JOIN conversation AS c ON c.conversation_id = i.conversation_id;
        EXIT WHEN NOT p_write OR v_found = v_locked;
    END LOOP;
    v_now := clock_timestamp();
    v_edit_from := v_now - make_interval(secs => p_edit_window);
    v_recall_from := v_now - make_interval(secs => p_recall_window);

    -- 2. Client ids known already, before every other check.
    SELECT array_agg(CASE WHEN e.seq IS NULL THEN NULL WHEN e.digest = i.digest THEN 'duplicate'
                          ELSE 'client_msg_id_reused' END ORDER BY i.ord),
           array_agg(e.seq ORDER BY i.ord),
           array_agg(e.event_id ORDER BY i.ord),
           array_agg(e.created_at ORDER BY i.ord)
    INTO v_outcome, v_seq, v_event_id, v_created_at
    FROM unnest(p_conversation, p_sender, p_client_msg_id, p_digest)
        WITH ORDINALITY AS i (conversation_id, sender_id, client_msg_id, digest, ord)
    LEFT JOIN event AS e ON e.conversation_id = i.conversation_id AND e.sender_id = i.sender_id
        AND e.client_msg_id = i.client_msg_id;

    -- 3. Membership, rights, target. A group that somebody is added to is counted once in its life.
    IF p_write AND 'add' = ANY (p_action) THEN
        UPDATE conversation AS c
        SET members = (
            SELECT count(*) FROM member AS m WHERE m.conversation_id = c.conversation_id AND upper_inf(m.visible))
        FROM (
            SELECT DISTINCT i.conversation_id
            FROM unnest(p_conversation, p_action) AS i (conversation_id, action)
            WHERE i.action = 'add'
        ) AS i
        WHERE c.conversation_id = i.conversation_id AND c.kind = 'group' AND c.members IS NULL;
    END IF;
    SELECT array_agg(coalesce(i.outcome, CASE
        WHEN i.kind IS NULL THEN 'not_found'
        WHEN i.type = 'system' AND i.as_service THEN NULL
        WHEN m.user_id IS NULL THEN CASE WHEN i.as_service THEN 'not_member' ELSE 'not_found' END
        WHEN NOT upper_inf(m.visible) THEN 'not_member'
        WHEN i.type = 'message' THEN NULL
        WHEN i.type = 'system' THEN 'forbidden_system'
        WHEN i.type = 'conversation' THEN CASE WHEN m.role <> 'admin' THEN 'forbidden_admins_only' END
        WHEN i.type = 'member' THEN CASE
            WHEN i.kind = 'direct' THEN 'conflict_direct'
            WHEN i.action <> 'leave' AND m.role <> 'admin' THEN 'forbidden_admins_only'
            WHEN i.action = 'add' THEN CASE
                WHEN upper_inf(s.visible) THEN 'conflict_already_member'
                WHEN p_group_size <= (SELECT c.members FROM conversation AS c WHERE c.conversation_id = i.conversation_id)
                     THEN 'conflict_group_full' END
            WHEN i.action IN ('remove', 'role') AND upper_inf(s.visible) IS NOT TRUE THEN 'conflict_no_member'
            WHEN s.role <> 'admin' THEN NULL
            WHEN i.action IN ('leave', 'remove') THEN CASE
                WHEN is_last_admin(i.conversation_id, i.subject) AND has_other_members(i.conversation_id, i.subject)
                     THEN 'conflict_last_admin' END
            WHEN i.action = 'role' AND i.role <> 'admin' AND is_last_admin(i.conversation_id, i.subject)
                 THEN 'conflict_last_admin'
            END
        WHEN t.seq IS NULL OR NOT t.seq <@ m.visible THEN 'not_found_target'
        WHEN t.sender_id <> i.sender_id AND (i.type = 'edit' OR m.role <> 'admin') THEN 'forbidden_not_yours'
        WHEN t.type NOT IN ('message', 'system') THEN 'conflict_target_type'
        WHEN t.recalled_by IS NOT NULL OR t.deleted_by IS NOT NULL THEN 'conflict_target_gone'
        WHEN i.type = 'edit' THEN CASE WHEN t.created_at < v_edit_from THEN 'forbidden_too_late' END
        WHEN t.created_at < v_recall_from AND m.role <> 'admin' THEN 'forbidden_too_late'
        END, i.refused) ORDER BY i.ord)
    INTO v_outcome
    FROM unnest(p_conversation, v_kind, v_outcome, p_sender, p_type, p_target, p_as_service, p_action, p_subject, p_role,
            p_refused)
        WITH ORDINALITY AS i
            (conversation_id, kind, outcome, sender_id, type, target_seq, as_service, action, subject, role, refused, ord)
    LEFT JOIN member AS m ON m.conversation_id = i.conversation_id AND m.user_id = i.sender_id
    LEFT JOIN member AS s ON s.conversation_id = i.conversation_id AND s.user_id = i.subject
    LEFT JOIN event AS t ON t.conversation_id = i.conversation_id AND t.seq = i.target_seq;

    IF NOT p_write THEN
        RETURN QUERY SELECT coalesce(o.outcome, 'new'), o.seq, o.event_id, o.created_at
            FROM unnest(v_outcome, v_seq, v_event_id, v_created_at)
                WITH ORDINALITY AS o (outcome, seq, event_id, created_at, ord)
            ORDER BY o.ord;
        RETURN;
    END IF;

    -- 4. Number and insert only what passed, and of copies of a client id only the first that passed.
    SELECT array_agg(n.first ORDER BY n.ord),
           array_agg(coalesce(n.seq, CASE WHEN n.first = n.ord THEN n.head + n.nth END) ORDER BY n.ord),
           array_agg(coalesce(n.event_id, CASE WHEN n.first = n.ord THEN uuidv7() END) ORDER BY n.ord),
           array_agg(coalesce(n.created_at, v_now) ORDER BY n.ord),
           bool_and(n.first IS NOT DISTINCT FROM n.ord)
    INTO v_first, v_seq, v_event_id, v_created_at, v_all_new
    FROM (
        SELECT f.*, count(*) FILTER (WHERE f.first = f.ord)
                   OVER (PARTITION BY f.conversation_id ORDER BY f.ord) AS nth
        FROM (
            SELECT i.*, CASE WHEN i.outcome IS NULL THEN (min(i.ord) FILTER (WHERE i.outcome IS NULL)
                       OVER (PARTITION BY i.conversation_id, i.sender_id, i.client_msg_id))::int END AS first
            FROM unnest(p_conversation, p_sender, p_client_msg_id, v_outcome, v_head, v_seq, v_event_id, v_created_at)
                WITH ORDINALITY AS i
                    (conversation_id, sender_id, client_msg_id, outcome, head, seq, event_id, created_at, ord)
        ) AS f
    ) AS n;

    INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body, target_seq, created_at)
    SELECT i.conversation_id, i.seq, i.event_id, i.type, i.sender_id, i.client_msg_id, i.digest, i.body::json,
           i.target_seq, v_now
    FROM unnest(v_first, p_conversation, v_seq, v_event_id, p_type, p_sender, p_client_msg_id, p_digest, p_body, p_target)
        WITH ORDINALITY AS i
            (first, conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body, target_seq, ord)
    WHERE i.first = i.ord
    ORDER BY i.ord;

    WITH moved AS (
        UPDATE conversation AS c
        SET last_seq = n.last_seq, changed_xid = pg_current_xact_id()
        FROM (
            SELECT i.conversation_id, max(i.seq) AS last_seq
            FROM unnest(v_first, p_conversation, v_seq) WITH ORDINALITY AS i (first, conversation_id, seq, ord)
            WHERE i.first = i.ord
            GROUP BY i.conversation_id
        ) AS n
        WHERE c.conversation_id = n.conversation_id
        RETURNING c.conversation_id, old.last_seq AS head_before, new.last_seq AS head_after
    )
    SELECT array_agg(m.conversation_id), array_agg(m.head_before), array_agg(m.head_after)
    INTO v_crossed, v_heads_before, v_heads_after
    FROM moved AS m
    WHERE m.head_before / count_bucket() < m.head_after / count_bucket();

    IF EXISTS (SELECT FROM unnest(p_type) AS t WHERE t NOT IN ('message', 'system')) THEN
        PERFORM apply_changes(
            array_agg(i.conversation_id), array_agg(i.type), array_agg(i.seq), array_agg(i.target_seq),
            array_agg(i.action), array_agg(i.subject), array_agg(i.role), array_agg(i.title),
            array_agg(i.sets_title))
        FROM unnest(v_first, p_conversation, p_type, v_seq, p_target, p_action, p_subject, p_role, p_title, p_sets_title)
            WITH ORDINALITY AS i
                (first, conversation_id, type, seq, target_seq, action, subject, role, title, sets_title, ord)
        WHERE i.type NOT IN ('message', 'system') AND i.first = i.ord;
    END IF;
    IF v_crossed IS NOT NULL THEN
        PERFORM close_counts(v_crossed, v_heads_before, v_heads_after);
    END IF;

    -- A copy is judged against its first: the same content is a duplicate, another is a reused id.
    IF NOT v_all_new THEN
        SELECT array_agg(CASE
                   WHEN o.outcome IS NOT NULL OR o.first = o.ord THEN o.outcome
                   WHEN p_digest[o.first] = p_digest[o.ord] THEN 'duplicate'
                   ELSE 'client_msg_id_reused' END ORDER BY o.ord)
        INTO v_outcome
        FROM unnest(v_outcome, v_first) WITH ORDINALITY AS o (outcome, first, ord);

        INSERT INTO transition (
            at, from_seq, to_seq, conversation_id, service, kind, cause, user_id, device_id, trace_id, detail)
        SELECT v_now, o.seq, o.seq, o.conversation_id, 'ingest', 'sent',
               CASE o.outcome WHEN 'duplicate' THEN o.outcome ELSE 'refused:' || o.outcome END,
               o.sender_id, o.device_id, split_part(o.traceparent, '-', 2),
               json_build_object('client_msg_id', o.client_msg_id, 'type', o.type)
        FROM (
            SELECT i.*, v_seq[coalesce(i.first, i.ord::int)] AS seq
            FROM unnest(v_outcome, v_first, p_conversation, p_sender, p_device, p_traceparent, p_client_msg_id, p_type)
                WITH ORDINALITY AS i
                    (outcome, first, conversation_id, sender_id, device_id, traceparent, client_msg_id, type, ord)
            WHERE i.outcome IS NOT NULL
        ) AS o
        ORDER BY o.ord;
    END IF;

    -- 5. The shards' locks, sorted.
    PERFORM lock_outbox_shards(array_agg(DISTINCT i.shard))
    FROM unnest(v_first, v_shard) WITH ORDINALITY AS i (first, shard, ord)
    WHERE i.first = i.ord;

    -- 6. The outbox rows; ids are drawn here, under the locks.
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at, device_id)
    SELECT i.shard, i.conversation_id, i.seq, i.event_id, 'events.v1', 'waybill.event.' || i.type, '/waybill/ingest',
           CASE WHEN i.traceparent IS NULL THEN '{}' ELSE ARRAY['traceparent', i.traceparent] END,
           convert_to(event_frame(i.conversation_id, i.seq, i.event_id, i.type, i.sender_id, i.client_msg_id, i.body,
               i.target_seq, v_now, NULL, NULL, NULL), 'UTF8'),
           v_now, i.device_id
    FROM unnest(v_first, v_shard, p_conversation, v_seq, v_event_id, p_type, p_sender, p_client_msg_id, p_body, p_target,
            p_traceparent, p_device)
        WITH ORDINALITY AS i
            (first, shard, conversation_id, seq, event_id, type, sender_id, client_msg_id, body, target_seq,
             traceparent, device_id, ord)
    WHERE i.first = i.ord
    ORDER BY i.shard, i.conversation_id, i.seq;

    RETURN QUERY SELECT coalesce(o.outcome, 'new'), v_seq[coalesce(o.first, o.ord)], v_event_id[coalesce(o.first, o.ord)],
            v_created_at[coalesce(o.first, o.ord)]
        FROM unnest(v_outcome, v_first) WITH ORDINALITY AS o (outcome, first, ord)
        ORDER BY o.ord;
END $$;

-- For services of the version before.
CREATE OR REPLACE FUNCTION write_events(
    p_conversation uuid[], p_sender text[], p_client_msg_id text[], p_type text[], p_digest bytea[], p_body text[],
    p_target bigint[], p_as_service boolean[], p_action text[], p_subject text[], p_role text[], p_title text[],
    p_sets_title boolean[], p_traceparent text[], p_write boolean
) RETURNS TABLE (outcome text, seq bigint, event_id uuid, created_at timestamptz)
LANGUAGE sql
AS $$
    SELECT outcome, seq, event_id, created_at
    FROM append_events(
        p_conversation, p_sender, p_client_msg_id, p_type, p_digest, p_body, p_target, p_as_service, p_action, p_subject,
        p_role, p_title, p_sets_title, p_traceparent, NULL, NULL, NULL, NULL, NULL, p_write)
$$;

-- Makes a conversation with its members and its first event, or finds the one that has this id. outcome: 'created',
-- 'existing', 'conflict' if what has this id is not the same, or 'full' if it would have more than p_group_size members
-- (null: no limit). p_members holds the creator too. A group is the same if its creator is; a direct chat if its two
-- members are. What is not 'created' is noted in `transition`.
CREATE OR REPLACE FUNCTION start_conversation(
    p_conversation uuid, p_shard smallint, p_kind text, p_title text, p_history text, p_creator text,
    p_members text[], p_body text, p_digest bytea, p_group_size int
) RETURNS text
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz;
    v_event_id uuid := uuidv7();
    v_found conversation;
    v_outcome text;
BEGIN
    v_now := clock_timestamp();
    IF p_kind = 'group' AND cardinality(p_members) > p_group_size
        AND NOT EXISTS (SELECT FROM conversation WHERE conversation_id = p_conversation)
    THEN
        v_outcome := 'full';
    ELSE
        INSERT INTO conversation (conversation_id, shard, kind, title, history, creator_id, last_seq, created_at)
        VALUES (p_conversation, p_shard, p_kind, p_title, p_history, p_creator, 1, v_now)
        ON CONFLICT (conversation_id) DO NOTHING;
        IF NOT FOUND THEN
            SELECT * INTO v_found FROM conversation WHERE conversation_id = p_conversation;
            v_outcome := CASE
                WHEN v_found.kind <> p_kind OR (p_kind = 'group' AND v_found.creator_id <> p_creator) THEN 'conflict'
                WHEN p_kind = 'direct' AND ARRAY(
                    SELECT user_id FROM member WHERE conversation_id = p_conversation ORDER BY user_id
                ) <> ARRAY(SELECT u COLLATE "C" FROM unnest(p_members) AS u ORDER BY u COLLATE "C") THEN 'conflict'
                ELSE 'existing' END;
        END IF;
    END IF;
    IF v_outcome IS NOT NULL THEN
        INSERT INTO transition (conversation_id, service, kind, cause, user_id, detail)
        VALUES (p_conversation, 'ingest', 'sent',
                CASE v_outcome WHEN 'existing' THEN 'duplicate' WHEN 'full' THEN 'refused:conflict_group_full'
                               ELSE 'refused:conflict' END,
                p_creator, json_build_object('client_msg_id', 'create:' || p_conversation, 'type', 'conversation'));
        RETURN v_outcome;
    END IF;

    INSERT INTO member (conversation_id, user_id, role, visible)
    SELECT p_conversation, u, CASE WHEN p_kind = 'group' AND u = p_creator THEN 'admin' ELSE 'member' END, '{[1,)}'
    FROM unnest(p_members) AS u
    ORDER BY u COLLATE "C";

    INSERT INTO event (conversation_id, seq, event_id, type, sender_id, client_msg_id, digest, body, created_at)
    VALUES (p_conversation, 1, v_event_id, 'conversation', p_creator, 'create:' || p_conversation, p_digest,
            p_body::json, v_now);

    PERFORM lock_outbox_shards(ARRAY[p_shard]);

    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
    VALUES (p_shard, p_conversation, 1, v_event_id, 'events.v1', 'waybill.event.conversation', '/waybill/ingest',
            convert_to(event_frame(p_conversation, 1, v_event_id, 'conversation', p_creator,
                'create:' || p_conversation, p_body, NULL, v_now, NULL, NULL, NULL), 'UTF8'),
            v_now);
    RETURN 'created';
END $$;

-- For services of the version before.
CREATE OR REPLACE FUNCTION create_conversation(
    p_conversation uuid, p_shard smallint, p_kind text, p_title text, p_history text, p_creator text,
    p_members text[], p_body text, p_digest bytea
) RETURNS text
LANGUAGE sql
AS $$
    SELECT start_conversation(
        p_conversation, p_shard, p_kind, p_title, p_history, p_creator, p_members, p_body, p_digest, NULL)
$$;

-- Sets a policy (p_age null: bodies are kept), or with p_clear takes it away; of a conversation, or of all that have none
-- of their own. Whether something changed. Raises 'P0002' for a conversation that is not there. The next round begins at
-- once.
CREATE OR REPLACE FUNCTION set_retention(p_conversation uuid, p_age interval, p_clear boolean, p_who text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF p_clear THEN
        DELETE FROM retention_policy WHERE conversation_id IS NOT DISTINCT FROM p_conversation;
    ELSE
        IF p_conversation IS NOT NULL THEN
            PERFORM FROM conversation WHERE conversation_id = p_conversation;
            IF NOT FOUND THEN
                RAISE no_data_found USING MESSAGE = 'there is no such conversation';
            END IF;
        END IF;
        INSERT INTO retention_policy AS p (conversation_id, age, set_by) VALUES (p_conversation, p_age, p_who)
        ON CONFLICT (conversation_id) DO UPDATE
        SET age = excluded.age, set_by = excluded.set_by, set_at = excluded.set_at
        WHERE p.age IS DISTINCT FROM excluded.age;
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE retention_round SET position = NULL, begun_at = '-infinity';
    INSERT INTO transition (conversation_id, service, kind, cause, detail)
    VALUES (p_conversation, 'console', 'settings', CASE WHEN p_clear THEN 'retention_cleared' ELSE 'retention' END,
            json_build_object('who', p_who, 'age_s', extract(epoch FROM p_age)));
    RETURN true;
END $$;

-- One step of erasing bodies by age: goes on behind where the last one ended, through at most p_conversations, and looks at
-- about p_events events. A round goes through all conversations; the next one begins p_pause after it began. Returns how many
-- conversations were done and bodies erased, and whether there is more to do now; no row if somebody else is at it.
--
-- Bodies of messages, notices and edits are erased, whether they were recalled or not, with their copies; member and
-- conversation events keep theirs. Each conversation has its progress: an event is looked at once. A conversation's events
-- are as old as they are high, so its first one that is too young ends it.
CREATE OR REPLACE FUNCTION expire_bodies(p_conversations int, p_events int, p_pause interval)
RETURNS TABLE (conversations int, bodies int, is_more boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET lock_timeout = '500ms'
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_sort = on
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_age interval;
    v_position uuid;
    v_ids uuid[];
    v_left int := p_events;
    v_due record;
    v_seqs bigint[];
    v_old bigint[];
    v_erased bigint[];
    v_events uuid[];
    v_bodies int := 0;
    v_stopped_at int;
BEGIN
    IF NOT pg_try_advisory_xact_lock(20819, 0) THEN
        RETURN;
    END IF;
    SELECT r.position INTO v_position FROM retention_round AS r
    WHERE r.position IS NOT NULL OR r.begun_at < v_now - p_pause;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 0, 0, false;
        RETURN;
    END IF;
    IF v_position IS NULL THEN
        UPDATE retention_round SET begun_at = v_now;
        v_position := '00000000-0000-0000-0000-000000000000';
    END IF;
    SELECT p.age INTO v_age FROM retention_policy AS p WHERE p.conversation_id IS NULL;

    -- Without a rule for all, only those that have one of their own are gone through.
    IF v_age IS NULL THEN
        SELECT array_agg(n.conversation_id ORDER BY n.conversation_id) INTO v_ids
        FROM (
            SELECT p.conversation_id FROM retention_policy AS p
            WHERE p.conversation_id > v_position
            ORDER BY p.conversation_id LIMIT p_conversations
        ) AS n;
    ELSE
        SELECT array_agg(n.conversation_id ORDER BY n.conversation_id) INTO v_ids
        FROM (
            SELECT c.conversation_id FROM conversation AS c
            WHERE c.conversation_id > v_position
            ORDER BY c.conversation_id LIMIT p_conversations
        ) AS n;
    END IF;

    FOR v_due IN
        SELECT d.ord, d.conversation_id, d.upto, d.old_before
        FROM (
            SELECT i.ord, i.conversation_id, coalesce(g.upto, 0) AS upto,
                   v_now - CASE WHEN p.conversation_id IS NULL THEN v_age ELSE p.age END AS old_before
            FROM unnest(v_ids) WITH ORDINALITY AS i (conversation_id, ord)
            LEFT JOIN retention_policy AS p ON p.conversation_id = i.conversation_id
            LEFT JOIN retention_progress AS g ON g.conversation_id = i.conversation_id
        ) AS d
        CROSS JOIN LATERAL (
            SELECT e.created_at FROM event AS e
            WHERE e.conversation_id = d.conversation_id AND e.seq > d.upto
            ORDER BY e.seq LIMIT 1
        ) AS f
        WHERE f.created_at < d.old_before
        ORDER BY d.ord
    LOOP
        IF v_left <= 0 THEN
            v_stopped_at := v_due.ord;
            EXIT;
        END IF;
        -- What lies below the first that is too young.
        SELECT array_agg(n.seq ORDER BY n.seq), array_agg(n.seq ORDER BY n.seq) FILTER (WHERE n.all_old)
        INTO v_seqs, v_old
        FROM (
            SELECT e.seq, bool_and(e.created_at < v_due.old_before) OVER (ORDER BY e.seq) AS all_old
            FROM event AS e
            WHERE e.conversation_id = v_due.conversation_id AND e.seq > v_due.upto
            ORDER BY e.seq LIMIT v_left
        ) AS n;

        PERFORM FROM event AS e
        WHERE e.conversation_id = v_due.conversation_id AND e.seq = ANY (v_old) AND has_text(e.type)
        ORDER BY e.seq
        FOR NO KEY UPDATE;
        WITH gone AS (
            UPDATE event AS e SET body = NULL
            WHERE e.conversation_id = v_due.conversation_id AND e.seq = ANY (v_old) AND has_text(e.type)
              AND e.body IS NOT NULL
            RETURNING e.seq, e.event_id
        )
        SELECT array_agg(g.seq), array_agg(g.event_id) INTO v_erased, v_events FROM gone AS g;
        IF v_erased IS NOT NULL THEN
            PERFORM erase_copies(v_events);
            INSERT INTO erasure (conversation_id, from_seq, to_seq, events, cause)
            SELECT v_due.conversation_id, min(s), max(s), count(*), 'retention' FROM unnest(v_erased) AS s;
            INSERT INTO transition (from_seq, to_seq, conversation_id, service, kind, cause, detail)
            SELECT min(s), max(s), v_due.conversation_id, 'relay', 'erased', 'retention',
                   json_build_object('bodies', count(*))
            FROM unnest(v_erased) AS s;
            v_bodies := v_bodies + cardinality(v_erased);
        END IF;
        INSERT INTO retention_progress (conversation_id, upto)
        VALUES (v_due.conversation_id, v_old[cardinality(v_old)])
        ON CONFLICT (conversation_id) DO UPDATE SET upto = excluded.upto;
        IF cardinality(v_old) = cardinality(v_seqs) AND cardinality(v_seqs) = v_left THEN
            -- There may be more of it.
            v_stopped_at := v_due.ord;
            EXIT;
        END IF;
        v_left := v_left - cardinality(v_seqs);
    END LOOP;

    IF v_stopped_at IS NOT NULL THEN
        UPDATE retention_round SET position = CASE WHEN v_stopped_at > 1 THEN v_ids[v_stopped_at - 1] ELSE v_position END;
        RETURN QUERY SELECT v_stopped_at - 1, v_bodies, true;
    ELSIF cardinality(v_ids) = p_conversations THEN
        UPDATE retention_round SET position = v_ids[p_conversations];
        RETURN QUERY SELECT p_conversations, v_bodies, true;
    ELSE
        UPDATE retention_round SET position = NULL, ended_at = clock_timestamp();
        RETURN QUERY SELECT coalesce(cardinality(v_ids), 0), v_bodies, false;
    END IF;
END $$;

-- What a vacuum that begins now would take away the old versions of: all erasures in transactions before the one returned.
-- Null if it has nothing to do: no erasure is older than p_age, or somebody still looks at the store as it was before the
-- oldest one. Seen by an owner that is no superuser, other roles' transactions are not counted.
CREATE OR REPLACE FUNCTION erasures_to_vacuum(p_age interval) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
AS $$
    SELECT h.upto::text
    FROM (
        SELECT least(
            pg_snapshot_xmin(pg_current_snapshot()),
            (pg_snapshot_xmax(pg_current_snapshot())::text::bigint - (
                SELECT coalesce(max(age(o.xmin)), 0)
                FROM (
                    SELECT backend_xmin AS xmin FROM pg_stat_activity WHERE pid <> pg_backend_pid()
                    UNION ALL
                    SELECT xmin FROM pg_replication_slots
                    UNION ALL
                    SELECT transaction FROM pg_prepared_xacts
                ) AS o))::text::xid8) AS upto
    ) AS h
    CROSS JOIN (
        SELECT e.xid, e.at
        FROM erasure AS e
        WHERE e.xid >= (SELECT v.upto FROM erasure_vacuum AS v)
        ORDER BY e.xid LIMIT 1
    ) AS oldest
    WHERE oldest.at < clock_timestamp() - p_age AND oldest.xid < h.upto
$$;

-- Writes down that a vacuum which began at p_began has taken away all before p_upto; whether it had ended for each table.
CREATE OR REPLACE FUNCTION erasures_vacuumed(p_upto text, p_began timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_class AS c
        JOIN pg_stat_all_tables AS s ON s.relid IN (c.oid, c.reltoastrelid)
        WHERE c.oid IN ('event'::regclass, 'dead_letter'::regclass) AND coalesce(s.last_vacuum < p_began, true))
    THEN
        RETURN false;
    END IF;
    UPDATE erasure_vacuum SET upto = p_upto::xid8, at = clock_timestamp() WHERE upto < p_upto::xid8;
    RETURN true;
END $$;

-- How old the oldest erasure is whose rows' old versions may still lie in the store, in seconds; null if there is none.
CREATE OR REPLACE FUNCTION oldest_unvacuumed_erasure() RETURNS float8
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
AS $$
    SELECT extract(epoch FROM clock_timestamp() - e.at)::float8
    FROM erasure AS e
    WHERE e.xid >= (SELECT v.upto FROM erasure_vacuum AS v)
    ORDER BY e.xid LIMIT 1
$$;

REVOKE EXECUTE ON FUNCTION append_events, start_conversation, set_retention, expire_bodies, erasures_to_vacuum,
    erasures_vacuumed, oldest_unvacuumed_erasure, count_joined, count_changed FROM PUBLIC;
GRANT EXECUTE ON FUNCTION append_events, start_conversation TO waybill_ingest;
GRANT EXECUTE ON FUNCTION set_retention TO waybill_console;
GRANT EXECUTE ON FUNCTION expire_bodies, erasures_to_vacuum, erasures_vacuumed, oldest_unvacuumed_erasure TO waybill_relay;

GRANT INSERT ON erasure TO waybill_ingest;
-- To vacuum them: it lets a role read and change nothing.
GRANT MAINTAIN ON event, dead_letter TO waybill_relay;
GRANT SELECT ON erasure, erasure_vacuum, retention_policy, retention_progress, retention_round TO waybill_console;

COMMIT;

-- Copies of what was hidden before this version.
BEGIN;
SELECT erase_copies(array_agg(e.event_id))
FROM (
    SELECT d.event_id FROM dead_letter AS d WHERE d.topic = 'events.v1' AND d.event_id IS NOT NULL
    UNION
    SELECT p.event_id FROM outbox_parked AS p WHERE p.topic = 'events.v1' AND p.state <> 'sent'
) AS c
JOIN event AS e ON e.event_id = c.event_id
LEFT JOIN event AS t ON e.type = 'edit' AND t.conversation_id = e.conversation_id AND t.seq = e.target_seq
WHERE num_nonnulls(e.recalled_by, e.deleted_by, t.recalled_by, t.deleted_by) > 0
HAVING count(*) > 0;
COMMIT;

-- What is erased lives in old versions of rows until a vacuum: a fifth of the table, the default, would be years of them.
BEGIN;
SELECT alter_patiently('event', $alter$
    ALTER TABLE event SET (autovacuum_vacuum_scale_factor = 0.01);
$alter$);
COMMIT;

-- migrate:down
