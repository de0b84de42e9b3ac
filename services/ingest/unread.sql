-- name: unread_in_all
SELECT unread, conversations, muted_unread, muted_conversations FROM unread_in_all($1)
