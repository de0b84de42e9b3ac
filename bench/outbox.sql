-- name: writer
-- Rows as a service writes them: in one call, ids drawn under the locks of their shards, which are taken last.
CREATE OR REPLACE FUNCTION bench_write(
    p_shards smallint[], p_conversations uuid[], p_seqs bigint[], p_event_ids uuid[], p_payloads bytea[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lock_outbox_shards(p_shards);
    INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
    SELECT r.shard, r.conversation_id, r.seq, r.event_id, 'events.v1', 'waybill.event.message', '/waybill/ingest',
           r.payload, clock_timestamp()
    FROM unnest(p_shards, p_conversations, p_seqs, p_event_ids, p_payloads)
        WITH ORDINALITY AS r (shard, conversation_id, seq, event_id, payload, place)
    ORDER BY r.shard, r.conversation_id, r.place;
END $$

-- name: write
SELECT bench_write($1, $2, $3, $4, $5)

-- name: fill
-- A backlog's rows $3 to $4, over the conversations of $2, whose shards are $1; each ten have the time of one transaction.
INSERT INTO outbox (shard, conversation_id, seq, event_id, topic, type, source, payload, created_at)
SELECT ($1::smallint[])[1 + n % cardinality($1)], ($2::uuid[])[1 + n % cardinality($1)], 1 + n / cardinality($1),
       uuidv7(), 'events.v1', 'waybill.event.message', '/waybill/ingest',
       convert_to(rpad('{"n":' || n || ',"text":"', 248, 'x') || '"}', 'UTF8'),
       now() + n / 10 * interval '1 microsecond'
FROM generate_series($3::bigint, $4::bigint) AS n
