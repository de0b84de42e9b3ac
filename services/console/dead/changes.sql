-- name: retry
-- Letters are locked in the order of their ids, here and in discard, so that none waits for another in a circle.
WITH asked AS (
    SELECT dead_id, state, origin FROM dead_letter WHERE dead_id = ANY ($1::bigint[]) ORDER BY dead_id FOR NO KEY UPDATE
), changed AS (
    UPDATE dead_letter AS d SET state = 'retrying'
    FROM asked AS a WHERE d.dead_id = a.dead_id AND a.state = 'dead' AND can_retry_letter(a.origin)
    RETURNING d.dead_id
), noted AS (
    INSERT INTO dead_letter_action (dead_id, action, who) SELECT dead_id, 'retry', $2 FROM changed
)
SELECT a.dead_id, a.state AS before, a.origin, c.dead_id IS NOT NULL AS changed
FROM asked AS a
LEFT JOIN changed AS c ON c.dead_id = a.dead_id

-- name: discard
WITH asked AS (
    SELECT dead_id, state FROM dead_letter WHERE dead_id = ANY ($1::bigint[]) ORDER BY dead_id FOR NO KEY UPDATE
), changed AS (
    UPDATE dead_letter AS d SET state = 'discarded', settled_at = clock_timestamp()
    FROM asked AS a WHERE d.dead_id = a.dead_id AND a.state = 'dead'
    RETURNING d.dead_id
), noted AS (
    INSERT INTO dead_letter_action (dead_id, action, who, reason) SELECT dead_id, 'discard', $2, $3 FROM changed
)
SELECT a.dead_id, a.state AS before, c.dead_id IS NOT NULL AS changed
FROM asked AS a
LEFT JOIN changed AS c ON c.dead_id = a.dead_id
