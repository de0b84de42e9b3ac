-- migrate:up

-- Class of the advisory locks that order the writers of a shard of the outbox; the second key is the shard.
CREATE FUNCTION outbox_lock_class() RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 20817;

-- Ids of a shard are handed out in commit order only if every writer draws them under the shard's lock: called last,
-- in a statement of its own, before the insert into outbox.
CREATE FUNCTION lock_outbox_shards(shards smallint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    one smallint;
BEGIN
    FOR one IN SELECT DISTINCT s FROM unnest(shards) AS s ORDER BY s LOOP
        PERFORM pg_advisory_xact_lock(outbox_lock_class(), one);
    END LOOP;
END $$;

-- Whether `who` is the only admin; and whether anybody else is a member: the last admin may not leave others behind.
CREATE FUNCTION is_last_admin(conversation uuid, who text) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT NOT EXISTS (
        SELECT FROM member AS m
        WHERE m.conversation_id = conversation AND m.user_id <> who AND m.role = 'admin' AND upper_inf(m.visible))
    AND EXISTS (
        SELECT FROM member AS m
        WHERE m.conversation_id = conversation AND m.user_id = who AND m.role = 'admin' AND upper_inf(m.visible));
END;

CREATE FUNCTION has_other_members(conversation uuid, who text) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT EXISTS (
        SELECT FROM member AS m
        WHERE m.conversation_id = conversation AND m.user_id <> who AND upper_inf(m.visible));
END;

-- Writes a batch of events, or with p_write = false only says what it would refuse.
--
-- Arrays run in parallel, one element per event, in the order of arrival. p_as_service: written by a service, which
-- may write `system` events and needs no member for them. p_action, p_subject, p_role: of a `member` event; p_title
-- and p_sets_title: of a `conversation` event. A conversation with an event other than `message` and `system` in the
-- batch must have no second event in it, since such an event changes what the next one may do.
--
-- Returns a row per event: outcome is 'new', 'duplicate' or the name of a refusal (services/ingest/admission.py). With
-- p_write = false, copies of one client id within the batch are all 'new'.
--
-- Each step is a statement of its own: in READ COMMITTED a statement that waited for a row lock goes on reading the
-- other tables in its old snapshot. The function is called as a statement by itself, so that no client round trip lies
-- between its first lock and its commit. Order of locks, the same for every writer: conversations, members, shards.
--
-- The planner settings below hold every look-up to its index: plans live as long as a connection, and one that was
-- made while a table was small would read the whole of it when it has grown.
CREATE FUNCTION write_events(
    p_conversation uuid[], p_sender text[], p_client_msg_id text[], p_type text[], p_digest bytea[], p_body text[],
    p_target bigint[], p_as_service boolean[], p_action text[], p_subject text[], p_role text[], p_title text[],
    p_sets_title boolean[], p_traceparent text[], p_write boolean
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

    -- 3. Membership, rights, target.
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
            WHEN i.action = 'add' AND upper_inf(s.visible) THEN 'conflict_already_member'
            WHEN i.action IN ('remove', 'role') AND upper_inf(s.visible) IS NOT TRUE THEN 'conflict_no_member'
            WHEN i.action IN ('leave', 'remove') AND is_last_admin(i.conversation_id, i.subject)
                 AND has_other_members(i.conversation_id, i.subject) THEN 'conflict_last_admin'
            WHEN i.action = 'role' AND i.role <> 'admin' AND is_last_admin(i.conversation_id, i.subject)
                 THEN 'conflict_last_admin'
            END
        WHEN t.seq IS NULL OR NOT t.seq <@ m.visible THEN 'not_found_target'
        WHEN t.sender_id <> i.sender_id AND (i.type = 'edit' OR m.role <> 'admin') THEN 'forbidden_not_yours'
        WHEN t.type NOT IN ('message', 'system') THEN 'conflict_target_type'
        WHEN t.recalled_by IS NOT NULL OR t.deleted_by IS NOT NULL THEN 'conflict_target_gone'
        END) ORDER BY i.ord)
    INTO v_outcome
    FROM unnest(p_conversation, v_kind, v_outcome, p_sender, p_type, p_target, p_as_service, p_action, p_subject, p_role)
        WITH ORDINALITY AS i
            (conversation_id, kind, outcome, sender_id, type, target_seq, as_service, action, subject, role, ord)
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
    v_now := clock_timestamp();
    SELECT array_agg(n.first ORDER BY n.ord),
           array_agg(coalesce(n.seq, CASE WHEN n.first = n.ord THEN n.head + n.nth END) ORDER BY n.ord),
           array_agg(coalesce(n.event_id, CASE WHEN n.first = n.ord THEN uuidv7() END) ORDER BY n.ord),
           array_agg(coalesce(n.created_at, v_now) ORDER BY n.ord)
    INTO v_first, v_seq, v_event_id, v_created_at
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

    UPDATE conversation AS c
    SET last_seq = n.last_seq, changed_xid = pg_current_xact_id()
    FROM (
        SELECT i.conversation_id, max(i.seq) AS last_seq
        FROM unnest(v_first, p_conversation, v_seq) WITH ORDINALITY AS i (first, conversation_id, seq, ord)
        WHERE i.first = i.ord
        GROUP BY i.conversation_id
    ) AS n
    WHERE c.conversation_id = n.conversation_id;

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

    -- 5. The shards' locks, sorted.
    PERFORM lock_outbox_shards(array_agg(DISTINCT i.shard))
    FROM unnest(v_first, v_shard) WITH ORDINALITY AS i (first, shard, ord)
    WHERE i.first = i.ord;

    -- 6. The outbox rows; ids are drawn here, under the locks.
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, headers, payload, created_at)
    SELECT i.shard, i.conversation_id, i.seq, i.event_id, 'events.v1', 'waybill.event.' || i.type, '/waybill/ingest',
           CASE WHEN i.traceparent IS NULL THEN '{}' ELSE ARRAY['traceparent', i.traceparent] END,
           convert_to(event_frame(i.conversation_id, i.seq, i.event_id, i.type, i.sender_id, i.client_msg_id, i.body,
               i.target_seq, v_now, NULL, NULL, NULL), 'UTF8'),
           v_now
    FROM unnest(v_first, v_shard, p_conversation, v_seq, v_event_id, p_type, p_sender, p_client_msg_id, p_body, p_target,
            p_traceparent)
        WITH ORDINALITY AS i
            (first, shard, conversation_id, seq, event_id, type, sender_id, client_msg_id, body, target_seq,
             traceparent, ord)
    WHERE i.first = i.ord
    ORDER BY i.shard, i.conversation_id, i.seq;

    -- A copy is judged against its first: the same content is a duplicate, another is a reused id.
    RETURN QUERY SELECT
        CASE WHEN o.outcome IS NOT NULL THEN o.outcome
             WHEN o.first = o.ord THEN 'new'
             WHEN p_digest[o.first] = p_digest[o.ord] THEN 'duplicate'
             ELSE 'client_msg_id_reused' END,
        v_seq[coalesce(o.first, o.ord)], v_event_id[coalesce(o.first, o.ord)], v_created_at[coalesce(o.first, o.ord)]
        FROM unnest(v_outcome, v_first) WITH ORDINALITY AS o (outcome, first, ord)
        ORDER BY o.ord;
END $$;

-- What edit, recall, delete, member and conversation events do beside standing in the timeline; at most one per
-- conversation, with the conversation's lock held.
CREATE FUNCTION apply_changes(
    p_conversation uuid[], p_type text[], p_seq bigint[], p_target bigint[], p_action text[], p_subject text[],
    p_role text[], p_title text[], p_sets_title boolean[]
) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE event AS e
    SET edited_by = CASE i.type WHEN 'edit' THEN i.seq ELSE e.edited_by END,
        recalled_by = CASE i.type WHEN 'recall' THEN i.seq ELSE e.recalled_by END,
        deleted_by = CASE i.type WHEN 'delete' THEN i.seq ELSE e.deleted_by END,
        body = CASE i.type WHEN 'delete' THEN NULL ELSE e.body END
    FROM unnest(p_conversation, p_type, p_seq, p_target) AS i (conversation_id, type, seq, target_seq)
    WHERE i.type IN ('edit', 'recall', 'delete')
      AND e.conversation_id = i.conversation_id AND e.seq = i.target_seq;

    UPDATE event AS e
    SET body = NULL
    FROM unnest(p_conversation, p_type, p_target) AS i (conversation_id, type, target_seq)
    WHERE i.type = 'delete'
      AND e.conversation_id = i.conversation_id AND e.target_seq = i.target_seq AND e.type = 'edit';

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

-- Makes a conversation with its members and its first event, or finds the one that has this id. outcome: 'created',
-- 'existing', or 'conflict' if what has this id is not the same. p_members holds the creator too. A group is the same
-- if its creator is; a direct chat if its two members are.
CREATE FUNCTION create_conversation(
    p_conversation uuid, p_shard smallint, p_kind text, p_title text, p_history text, p_creator text,
    p_members text[], p_body text, p_digest bytea
) RETURNS text
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz;
    v_event_id uuid := uuidv7();
    v_found conversation;
BEGIN
    v_now := clock_timestamp();
    INSERT INTO conversation (conversation_id, shard, kind, title, history, creator_id, last_seq, created_at)
    VALUES (p_conversation, p_shard, p_kind, p_title, p_history, p_creator, 1, v_now)
    ON CONFLICT (conversation_id) DO NOTHING;
    IF NOT FOUND THEN
        SELECT * INTO v_found FROM conversation WHERE conversation_id = p_conversation;
        IF v_found.kind <> p_kind OR (p_kind = 'group' AND v_found.creator_id <> p_creator) THEN
            RETURN 'conflict';
        END IF;
        IF p_kind = 'direct' AND ARRAY(
            SELECT user_id FROM member WHERE conversation_id = p_conversation ORDER BY user_id
        ) <> ARRAY(SELECT u COLLATE "C" FROM unnest(p_members) AS u ORDER BY u COLLATE "C") THEN
            RETURN 'conflict';
        END IF;
        RETURN 'existing';
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

REVOKE EXECUTE ON FUNCTION write_events, create_conversation, apply_changes, lock_outbox_shards FROM PUBLIC;
GRANT EXECUTE ON FUNCTION write_events, create_conversation, apply_changes TO waybill_ingest;
GRANT EXECUTE ON FUNCTION lock_outbox_shards TO waybill_ingest, waybill_receipts;

-- A writer that hangs must not hold its locks: each of these ends its transaction. transaction_timeout counts from the
-- first message of a statement that stands alone, too.
ALTER ROLE waybill_ingest SET statement_timeout = '8s';
ALTER ROLE waybill_ingest SET lock_timeout = '3s';
ALTER ROLE waybill_ingest SET transaction_timeout = '8s';
ALTER ROLE waybill_ingest SET idle_in_transaction_session_timeout = '3s';
ALTER ROLE waybill_ingest SET tcp_user_timeout = '5s';
-- Its reads are by key. A plan lives as long as a connection: one made while a table was small would scan it for ever.
ALTER ROLE waybill_ingest SET enable_seqscan = off;
ALTER ROLE waybill_receipts SET statement_timeout = '8s';
ALTER ROLE waybill_receipts SET lock_timeout = '3s';
ALTER ROLE waybill_receipts SET transaction_timeout = '8s';
ALTER ROLE waybill_receipts SET idle_in_transaction_session_timeout = '3s';
ALTER ROLE waybill_receipts SET tcp_user_timeout = '5s';
ALTER ROLE waybill_relay SET statement_timeout = '8s';
ALTER ROLE waybill_relay SET lock_timeout = '3s';
ALTER ROLE waybill_relay SET transaction_timeout = '8s';
ALTER ROLE waybill_relay SET idle_in_transaction_session_timeout = '3s';
ALTER ROLE waybill_relay SET tcp_user_timeout = '5s';

-- migrate:down
