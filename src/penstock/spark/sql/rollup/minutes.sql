-- Events of each queue by minute, and how many messages came and went by them.
SELECT part, 'minute' AS what, queue_number, at_ms div {MINUTE_MS} AS at, 1 AS events,
  CAST(sequence % {ENTRY_SPAN} = 0 AS int) AS entries, body_bytes AS bytes,
  CAST(code = {Pushed} AS int) AS pushes, CAST(code = {Claimed} AS int) AS claims,
  CAST(code = {Deleted} AS int) AS deletes, CAST(code = {ClaimExpired} AS int) AS timeouts,
  CAST(code = {Expired} AS int) AS expired, CAST(code = {Lost} AS int) AS lost,
  CAST(code IN ({Moved}, {Departed}) AS int) AS went,
  CASE WHEN code = {Pushed} THEN 1 WHEN {LEFT_QUEUE} THEN -1 ELSE 0 END AS messages,
  CAST(code = {Pushed} OR {LEFT_QUEUE} AS int) AS changes, at_ms AS last_at_ms
FROM (
  SELECT part, queue AS queue_number, code, at_ms, sequence, body_bytes FROM irregular_events
  UNION ALL
  SELECT part, queue_number, step.* FROM messages LATERAL VIEW stack(3,
    {Pushed}, pushed_at_ms, pushed, body_bytes,
    {Claimed}, first_pulled_at_ms, claimed, NULL,
    {Deleted}, if(deleted IS NULL, NULL, ended_at_ms), deleted, NULL
  ) step AS code, at_ms, sequence, body_bytes
  WHERE regular AND sequence IS NOT NULL)
