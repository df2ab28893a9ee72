-- What each queue holds, and what a purge ended in it.
SELECT part, 'held' AS what, held_in_number AS queue_number,
  CAST(standing = 'visible' AS int) AS visible, CAST(standing = 'delayed' AS int) AS delayed,
  CAST(standing = 'in_flight' AS int) AS in_flight, CAST(standing IS NOT NULL AS int) AS live,
  if(standing IS NULL, NULL, body_bytes) AS bytes,
  if(standing IS NULL, NULL, pushed_at_ms) AS oldest_pushed_at_ms,
  CAST(state = 'purged' AS int) AS purged, CAST(pushed_at_ms IS NULL AS int) AS unpushed
FROM messages
