-- migrate:up

-- A reader that goes on for long would have every query wait behind this: better to fail, and to be run again.
SET LOCAL lock_timeout = '2s';

-- A user's own settings of a conversation. muted_until null: for ever. `changed_xid` moves with them. This table comes
-- before `event`, as in every writer's transaction, so that the two cannot hold each other up.
ALTER TABLE member
    ADD COLUMN muted boolean NOT NULL DEFAULT false,
    ADD COLUMN muted_until timestamptz,
    ADD COLUMN archived boolean NOT NULL DEFAULT false;

CREATE FUNCTION is_muted(muted boolean, muted_until timestamptz) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN muted AND coalesce(muted_until > statement_timestamp(), true);

-- Events are counted in buckets of so many seqs: bucket b holds the seqs (b * count_bucket(), (b + 1) * count_bucket()].
CREATE FUNCTION count_bucket() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 512;

-- How many events of a finished bucket count as unread for somebody: messages and notices that are neither recalled nor
-- deleted; by sender, and with sender '' of all of them. The row with sender '' says that the bucket is counted. Where it
-- is missing nobody has counted yet, and whoever wants to know counts events.
CREATE TABLE event_count (
    conversation_id uuid NOT NULL,
    sender_id text COLLATE "C" NOT NULL,
    bucket bigint NOT NULL,
    amount int NOT NULL,
    PRIMARY KEY (conversation_id, sender_id, bucket) INCLUDE (amount)
);

-- Counts finished buckets that are not counted yet. With the conversations' locks held.
CREATE FUNCTION count_buckets(p_conversation uuid[], p_bucket bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO event_count (conversation_id, sender_id, bucket, amount)
    SELECT i.conversation_id, coalesce(e.sender_id, ''), i.bucket, count(e.seq)
    FROM (SELECT DISTINCT * FROM unnest(p_conversation, p_bucket) AS i (conversation_id, bucket)) AS i
    LEFT JOIN event AS e ON e.conversation_id = i.conversation_id
        AND e.seq > i.bucket * count_bucket() AND e.seq <= (i.bucket + 1) * count_bucket()
        AND e.type IN ('message', 'system') AND e.recalled_by IS NULL AND e.deleted_by IS NULL
    GROUP BY GROUPING SETS ((i.conversation_id, i.bucket), (i.conversation_id, i.bucket, e.sender_id))
    HAVING grouping(e.sender_id) = 1 OR e.sender_id IS NOT NULL
    ON CONFLICT DO NOTHING;
END $$;

-- Counts the buckets that a writer has just finished; for its transaction, with the conversations' locks held, anywhere
-- after it has inserted its events. The arrays run in parallel: heads as they were, and as they are now.
CREATE FUNCTION close_counts(p_conversations uuid[], p_old_heads bigint[], p_new_heads bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF EXISTS (
        SELECT FROM unnest(p_old_heads, p_new_heads) AS h (was, now)
        WHERE h.now / count_bucket() > h.was / count_bucket()
    ) THEN
        PERFORM count_buckets(array_agg(h.conversation_id), array_agg(b))
        FROM unnest(p_conversations, p_old_heads, p_new_heads) AS h (conversation_id, was, now)
        CROSS JOIN generate_series(h.was / count_bucket(), h.now / count_bucket() - 1) AS b;
    END IF;
END $$;

-- An event that is recalled or deleted counts no more, and once, whatever happens to it afterwards. A trigger, since a
-- writer of an older version hides events in buckets that newer ones have counted; so no writer has to call anything.
-- What is hidden while its bucket is being counted would be counted for ever: this is for those who hold the
-- conversation's lock.
CREATE FUNCTION uncount_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
BEGIN
    UPDATE event_count AS c
    SET amount = c.amount - 1
    WHERE c.conversation_id = NEW.conversation_id AND c.sender_id IN ('', NEW.sender_id)
      AND c.bucket = (NEW.seq - 1) / count_bucket();
    RETURN NULL;
END $$;

CREATE TRIGGER uncount
AFTER UPDATE OF recalled_by, deleted_by ON event
FOR EACH ROW
WHEN (OLD.recalled_by IS NULL AND OLD.deleted_by IS NULL
      AND (NEW.recalled_by IS NOT NULL OR NEW.deleted_by IS NOT NULL) AND NEW.type IN ('message', 'system'))
EXECUTE FUNCTION uncount_event();

-- Counts at most p_most buckets of a conversation that were finished by a writer that counts none, the newest first; how
-- many.
CREATE FUNCTION close_late(p_conversation uuid, p_most int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
DECLARE
    v_head bigint;
    v_missing bigint[];
BEGIN
    SELECT c.last_seq INTO v_head
    FROM conversation AS c
    WHERE c.conversation_id = p_conversation
    FOR NO KEY UPDATE;
    SELECT array_agg(b) INTO v_missing
    FROM (
        SELECT b
        FROM generate_series(v_head / count_bucket() - 1, 0, -1) AS b
        WHERE NOT EXISTS (
            SELECT FROM event_count AS c
            WHERE c.conversation_id = p_conversation AND c.sender_id = '' AND c.bucket = b)
        LIMIT p_most
    ) AS m;
    IF v_missing IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM count_buckets(array_fill(p_conversation, ARRAY[cardinality(v_missing)]), v_missing);
    RETURN cardinality(v_missing);
END $$;

-- The first p_most conversations above an id, in the order of ids, and whether each has buckets that nobody counted.
CREATE FUNCTION uncounted(p_after uuid, p_most int) RETURNS TABLE (conversation_id uuid, lacks boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
AS $$
    SELECT c.conversation_id,
           CASE WHEN c.last_seq >= count_bucket() THEN (
               SELECT count(*) FROM event_count AS n
               WHERE n.conversation_id = c.conversation_id AND n.sender_id = '') < c.last_seq / count_bucket()
           ELSE false END
    FROM conversation AS c
    WHERE c.conversation_id > p_after
    ORDER BY c.conversation_id
    LIMIT p_most
$$;

-- Events of others from low to high that count as unread, one by one.
CREATE FUNCTION events_of_others(conversation uuid, who text, low bigint, high bigint) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT count(*)
    FROM event AS e
    WHERE e.conversation_id = conversation AND e.seq >= low AND e.seq <= high
      AND e.type IN ('message', 'system') AND e.sender_id <> who AND e.recalled_by IS NULL AND e.deleted_by IS NULL;
END;

-- What `events_of_others` says of all that a user sees above read_seq, up to head: whole buckets by their counts, and
-- event by event only what lies beside them, and what nobody has counted.
CREATE FUNCTION unread_of(conversation uuid, who text, visible int8multirange, read_seq bigint, head bigint) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT coalesce(sum(CASE
        WHEN s.first > s.last THEN events_of_others(conversation, who, s.low, s.high)
        ELSE events_of_others(conversation, who, s.low, s.first * count_bucket())
             + n.amount - own.amount
             + CASE WHEN n.buckets > s.last - s.first THEN 0 ELSE (
                   SELECT sum(events_of_others(conversation, who, b * count_bucket() + 1, (b + 1) * count_bucket()))
                   FROM generate_series(s.first, s.last) AS b
                   WHERE NOT EXISTS (
                       SELECT FROM event_count AS c
                       WHERE c.conversation_id = conversation AND c.sender_id = '' AND c.bucket = b)) END
             + events_of_others(conversation, who, (s.last + 1) * count_bucket() + 1, s.high)
        END), 0)::bigint
    FROM (
        SELECT lower(r.part) AS low, upper(r.part) - 1 AS high,
               (lower(r.part) - 2 + count_bucket()) / count_bucket() AS first,
               (upper(r.part) - 1) / count_bucket() - 1 AS last
        FROM unnest(visible * int8multirange(int8range(read_seq, greatest(read_seq, head), '(]'))) AS r (part)
    ) AS s
    CROSS JOIN LATERAL (
        SELECT count(*) AS buckets, coalesce(sum(c.amount), 0) AS amount
        FROM event_count AS c
        WHERE c.conversation_id = conversation AND c.sender_id = '' AND c.bucket >= s.first AND c.bucket <= s.last
    ) AS n
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(c.amount), 0) AS amount
        FROM event_count AS c
        WHERE c.conversation_id = conversation AND c.sender_id = who AND c.bucket >= s.first AND c.bucket <= s.last
    ) AS own;
END;

-- The sum of what a user's conversations say to be unread, and how many say more than 0; muted ones apart.
CREATE FUNCTION unread_in_all(p_user text)
RETURNS TABLE (unread bigint, conversations bigint, muted_unread bigint, muted_conversations bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
    SELECT coalesce(sum(u.unread) FILTER (WHERE NOT u.muted), 0)::bigint,
           count(*) FILTER (WHERE u.unread > 0 AND NOT u.muted),
           coalesce(sum(u.unread) FILTER (WHERE u.muted), 0)::bigint,
           count(*) FILTER (WHERE u.unread > 0 AND u.muted)
    FROM (
        SELECT is_muted(m.muted, m.muted_until) AS muted,
               CASE WHEN h.head > h.read_seq
                    THEN unread_of(m.conversation_id, m.user_id, m.visible, h.read_seq, h.head) ELSE 0 END AS unread
        FROM member AS m
        JOIN conversation AS c ON c.conversation_id = m.conversation_id
        LEFT JOIN receipt AS r ON r.conversation_id = m.conversation_id AND r.user_id = m.user_id
        CROSS JOIN LATERAL (
            SELECT coalesce(r.read_seq, 0) AS read_seq,
                   CASE WHEN upper_inf(m.visible) THEN c.last_seq ELSE visible_head(m.visible, c.last_seq) END AS head
        ) AS h
        WHERE m.user_id = p_user
    ) AS u
$$;

-- Sets what is not null of a user's own settings of a conversation; p_muted_until goes with p_muted. Returns them as they
-- are then, or no row for who never was a member. A time that has passed means not muted. What changes is written with
-- its transition and the record that tells the user's devices; what does not writes nothing.
--
-- Locks in the order of every writer: the member's row, then the shard.
CREATE FUNCTION set_settings(
    p_conversation uuid, p_user text, p_muted boolean, p_muted_until timestamptz, p_archived boolean, p_device text,
    p_trace_id text
) RETURNS TABLE (muted boolean, muted_until text, archived boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_was member;
    v_was_muted boolean;
    v_muted boolean;
    v_until timestamptz;
    v_archived boolean;
BEGIN
    SELECT * INTO v_was
    FROM member AS m
    WHERE m.conversation_id = p_conversation AND m.user_id = p_user
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_was_muted := is_muted(v_was.muted, v_was.muted_until);
    v_muted := CASE WHEN p_muted IS NULL THEN v_was_muted ELSE is_muted(p_muted, p_muted_until) END;
    v_until := CASE WHEN NOT v_muted THEN NULL WHEN p_muted IS NULL THEN v_was.muted_until ELSE p_muted_until END;
    v_archived := coalesce(p_archived, v_was.archived);

    IF v_muted <> v_was_muted OR v_archived <> v_was.archived
       OR (v_muted AND v_until IS DISTINCT FROM v_was.muted_until) THEN
        UPDATE member AS m
        SET muted = v_muted, muted_until = v_until, archived = v_archived, changed_xid = pg_current_xact_id()
        WHERE m.conversation_id = p_conversation AND m.user_id = p_user;
        INSERT INTO transition (service, kind, cause, conversation_id, user_id, device_id, trace_id, detail)
        VALUES ('ingest', 'settings', 'set', p_conversation, p_user, p_device, p_trace_id,
                json_build_object('muted', v_muted, 'muted_until', wire_time(v_until), 'archived', v_archived));
        PERFORM announce_receipts(
            ARRAY[p_conversation], ARRAY[p_user], ARRAY['settings'], ARRAY['set'], ARRAY['']);
    END IF;
    RETURN QUERY SELECT v_muted, wire_time(v_until), v_archived;
END $$;

REVOKE EXECUTE ON FUNCTION count_buckets, close_counts, uncount_event, close_late, uncounted, unread_in_all, set_settings
FROM PUBLIC;
GRANT EXECUTE ON FUNCTION count_buckets, close_counts, close_late, uncounted, unread_in_all, set_settings
TO waybill_ingest;
GRANT SELECT ON event_count TO waybill_gateway, waybill_console;

-- migrate:down
