-- migrate:up

-- The relays that live: a relay that holds no shard yet must be counted too, or the others would never give it its share.
CREATE TABLE relay_owner (
    owner text PRIMARY KEY,
    seen_until timestamptz NOT NULL
);
GRANT SELECT, INSERT, UPDATE, DELETE ON relay_owner TO waybill_relay;
GRANT SELECT ON relay_owner TO waybill_console;

-- migrate:down
