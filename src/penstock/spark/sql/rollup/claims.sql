-- Messages by how often they were claimed (`at`).
SELECT part, 'claims' AS what, queue_number, claims AS at, 1 AS messages, timeouts, releases,
  CAST(state = 'deleted' AS int) AS deletes, dead_letters,
  CAST(state IN ('dead', 'departed', 'arrived') AS int) AS dead
FROM messages WHERE claims > 0
