-- name: expire
SELECT conversations, bodies, is_more FROM expire_bodies($1, $2, make_interval(secs => $3))

-- name: to_vacuum
SELECT erasures_to_vacuum(make_interval(secs => $1)) AS upto, clock_timestamp() AS began

-- name: vacuum
-- A page that has been done is passed over the next time, so that what is cut short goes on from there. Dead index
-- entries are left to autovacuum: they hold no body.
VACUUM (INDEX_CLEANUP OFF, TRUNCATE OFF, SKIP_LOCKED) event, dead_letter

-- name: vacuumed
SELECT erasures_vacuumed($1, $2)

-- name: gauges
SELECT oldest_unvacuumed_erasure()
