-- How long messages waited (`wait`), were held (`hold`), and took (`end to end`), by the hour in which
-- that ended (`at`), in bins: bin 0 is less than a millisecond, bin n from 1.01^(n-1) to 1.01^n.
SELECT part, what, queue_number, at_ms div {HOUR_MS} AS at,
  if(took_ms < 1, 0, 1 + CAST(floor(ln(took_ms) / ln({BIN_RATIO})) AS int)) AS bin,
  1 AS samples, took_ms AS max_ms
FROM (
  SELECT part, queue_number, step.* FROM messages LATERAL VIEW stack(2,
    'wait', first_pulled_at_ms, wait_ms,
    'end to end', ended_at_ms, if(state = 'deleted', age_ms, NULL)) step AS what, at_ms, took_ms
  UNION ALL
  SELECT part, queue_number, 'hold', ended_at_ms, hold_ms FROM attempts)
WHERE took_ms IS NOT NULL
