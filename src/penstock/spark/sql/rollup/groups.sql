-- Messages by their group.
SELECT part, 'group' AS what, queue_number, `group`, 1 AS messages, body_bytes AS bytes, claims,
  timeouts, dead_letters, CAST(standing IS NOT NULL AS int) AS live
FROM messages WHERE `group` IS NOT NULL
