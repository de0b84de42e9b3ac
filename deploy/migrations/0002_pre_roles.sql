-- migrate:up

-- One role per service with the grants that it needs and no more. Roles belong to the whole server, so another
-- database on it may have made them; `waybill migrate` gives them a password.
DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['ingest', 'relay', 'gateway', 'receipts', 'console'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'waybill_' || name) THEN
            BEGIN
                EXECUTE format('CREATE ROLE waybill_%s LOGIN', name);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;  -- another database's migration made it just now
            END;
        END IF;
        EXECUTE format('GRANT USAGE ON SCHEMA public TO waybill_%s', name);
    END LOOP;
END $$;

GRANT SELECT, INSERT ON conversation, member, event TO waybill_ingest;
GRANT UPDATE (last_seq, title, changed_xid) ON conversation TO waybill_ingest;
GRANT UPDATE (role, visible, changed_xid) ON member TO waybill_ingest;
GRANT UPDATE (body, edited_by, recalled_by, deleted_by) ON event TO waybill_ingest;
GRANT INSERT ON outbox TO waybill_ingest, waybill_receipts;
GRANT USAGE, SELECT ON SEQUENCE outbox_id_seq TO waybill_ingest, waybill_receipts;

GRANT SELECT ON outbox TO waybill_relay;
GRANT SELECT ON SEQUENCE outbox_id_seq TO waybill_relay;
GRANT SELECT, UPDATE ON outbox_shard TO waybill_relay;
GRANT SELECT, INSERT ON outbox_delivery TO waybill_relay;

GRANT SELECT ON store, conversation, member, event, receipt, device_cursor TO waybill_gateway;

GRANT SELECT ON conversation, member TO waybill_receipts;
GRANT SELECT, INSERT, UPDATE ON receipt, device_cursor, ack_offset TO waybill_receipts;

GRANT SELECT ON ALL TABLES IN SCHEMA public TO waybill_console;

-- migrate:down
