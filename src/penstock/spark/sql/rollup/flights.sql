-- Claims that began and ended, by minute.
SELECT part, 'minute' AS what, queue_number, at, in_flight, 1 AS changes
FROM attempts LATERAL VIEW stack(2,
  started_at_ms div {MINUTE_MS}, 1,
  ended_at_ms div {MINUTE_MS}, -1
) step AS at, in_flight
WHERE started_at_ms IS NOT NULL AND at IS NOT NULL
