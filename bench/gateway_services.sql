-- name: empty
TRUNCATE conversation, member, event, receipt, device_cursor
