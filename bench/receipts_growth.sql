-- name: sizes
-- Bytes of each table with its indexes and what is stored aside, its partitions in one; and rows that wait for a vacuum.
SELECT t.name,
       sum(pg_total_relation_size(p.relid))::bigint AS bytes,
       coalesce(sum(s.n_dead_tup), 0)::bigint AS dead
FROM unnest($1::text[]) AS t (name)
CROSS JOIN LATERAL (
    SELECT t.name::regclass AS relid
    UNION ALL
    SELECT inhrelid FROM pg_inherits WHERE inhparent = t.name::regclass
) AS p
LEFT JOIN pg_stat_user_tables AS s ON s.relid = p.relid
GROUP BY t.name

-- name: transitions
SELECT kind, count(*) AS amount FROM transition GROUP BY kind
