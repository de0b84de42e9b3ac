-- migrate:up

-- The relays that live: a relay that holds no shard yet must be counted too, or the others would never give it its share.
CREATE TABLE relay_owner (
    owner text PRIMARY KEY,
    seen_until timestamptz NOT NULL
);
GRANT SELECT, INSERT, UPDATE, DELETE ON relay_owner TO waybill_relay;
GRANT SELECT ON relay_owner TO waybill_console;

-- How many rows lie above a cursor cannot be known beforehand, and for a few of them the planner would gather and sort
-- them all: behind a backlog each read would then cost as much as the whole backlog. So the relay always reads in the
-- order of the index, and stops. Its few statements come many times a second, so each is planned once.
ALTER ROLE waybill_relay SET plan_cache_mode = force_generic_plan;
ALTER ROLE waybill_relay SET enable_sort = off;
ALTER ROLE waybill_relay SET enable_bitmapscan = off;
ALTER ROLE waybill_relay SET enable_seqscan = off;

-- migrate:down
