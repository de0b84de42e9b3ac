-- migrate:up

-- The relay asks which life of the store it is in (store_incarnation): its positions hold in one life only.
GRANT SELECT ON store TO waybill_relay;

-- migrate:down
