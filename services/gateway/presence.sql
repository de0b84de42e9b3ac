-- name: shares_conversation
-- Who of $4 is a member, now, of some conversation that an asker is a member of, too. $1: the askers; $2, $3: the first
-- and the last place in $4 of those that each asks for. An asker's conversations are found once (OFFSET keeps them from
-- being read for each of its users); each user is looked up in them by its own index, and the first hit ends it.
SELECT a.asker, u.user_id
FROM unnest($1::text[], $2::int[], $3::int[]) AS a (asker, low, high)
CROSS JOIN LATERAL (
    SELECT ARRAY(
        SELECT mine.conversation_id FROM member AS mine
        WHERE mine.user_id = a.asker AND upper_inf(mine.visible)
    ) AS conversations
    OFFSET 0
) AS c
CROSS JOIN LATERAL unnest(($4::text[])[a.low : a.high]) AS u (user_id)
CROSS JOIN LATERAL (
    SELECT FROM member AS theirs
    WHERE theirs.user_id = u.user_id AND theirs.conversation_id = ANY (c.conversations) AND upper_inf(theirs.visible)
    LIMIT 1
) AS shared
