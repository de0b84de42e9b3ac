-- migrate:up

-- Who has seq p_seq of a conversation: of those who may see it, but for its sender, how many there are, hold it
-- (`delivered`) and have read it (`read`), and a page of those in p_state ('read' | 'delivered' | 'unread', which is all
-- who have not read it), above the user id p_after, in order of user id, at most p_limit.
--
-- p_asker: who asks; null is a service, which sees all. No row: the asker never was a member, or there is no such
-- conversation. One row without counts: there is no such event, or the asker may not see it. Else a row per user of the
-- page, and one without a user if the page is empty.
--
-- An asker who has left is shown marks up to the last seq that it may see: what goes on behind it is not its to know.
--
-- It walks the members of the conversation and its receipts once, side by side and by their keys, whatever else these
-- tables hold.
CREATE FUNCTION message_receipts(
    p_conversation uuid, p_asker text, p_seq bigint, p_state text, p_after text, p_limit int
) RETURNS TABLE (
    members bigint, delivered bigint, "read" bigint, user_id text, delivered_seq bigint, read_seq bigint, read_version bigint
)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_nestloop = off
SET enable_mergejoin = on
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_visible int8multirange := '{[1,)}';
    v_last bigint;
    v_sender text;
    v_members bigint;
    v_delivered bigint;
    v_read bigint;
    v_page text[];
BEGIN
    IF p_asker IS NOT NULL THEN
        SELECT m.visible INTO v_visible FROM member AS m WHERE m.conversation_id = p_conversation AND m.user_id = p_asker;
    ELSE
        PERFORM FROM conversation AS c WHERE c.conversation_id = p_conversation;
    END IF;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_last := upper(v_visible) - 1;  -- null: without end, and `least` passes over it
    SELECT e.sender_id INTO v_sender
    FROM event AS e
    WHERE e.conversation_id = p_conversation AND e.seq = p_seq AND p_seq <@ v_visible;
    IF NOT FOUND THEN
        RETURN NEXT;
        RETURN;
    END IF;

    SELECT count(*), count(*) FILTER (WHERE r.delivered_seq >= p_seq), count(*) FILTER (WHERE r.read_seq >= p_seq),
           (array_agg(m.user_id ORDER BY m.user_id) FILTER (WHERE m.user_id > p_after AND CASE p_state
               WHEN 'read' THEN r.read_seq >= p_seq
               WHEN 'delivered' THEN r.delivered_seq >= p_seq
               ELSE coalesce(r.read_seq, 0) < p_seq END))[:p_limit]
    INTO v_members, v_delivered, v_read, v_page
    FROM (
        SELECT m.user_id FROM member AS m
        WHERE m.conversation_id = p_conversation AND p_seq <@ m.visible AND m.user_id <> v_sender
    ) AS m
    LEFT JOIN (
        SELECT r.user_id, r.delivered_seq, r.read_seq FROM receipt AS r WHERE r.conversation_id = p_conversation
    ) AS r ON r.user_id = m.user_id;

    RETURN QUERY
    SELECT v_members, v_delivered, v_read, p.user_id, least(coalesce(r.delivered_seq, 0), v_last),
           least(coalesce(r.read_seq, 0), v_last), coalesce(r.read_version, 0)
    FROM unnest(v_page) WITH ORDINALITY AS p (user_id, ord)
    LEFT JOIN LATERAL (
        SELECT r.delivered_seq, r.read_seq, r.read_version FROM receipt AS r
        WHERE r.conversation_id = p_conversation AND r.user_id = p.user_id
        OFFSET 0  -- each by its key
    ) AS r ON true
    ORDER BY p.ord;
    IF NOT FOUND THEN
        RETURN QUERY SELECT v_members, v_delivered, v_read, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint;
    END IF;
END $$;

REVOKE EXECUTE ON FUNCTION message_receipts FROM PUBLIC;
GRANT EXECUTE ON FUNCTION message_receipts TO waybill_ingest, waybill_gateway;
GRANT SELECT (conversation_id, user_id, delivered_seq, read_seq, read_version) ON receipt TO waybill_ingest;

-- migrate:down
