-- Messages that came into a queue by a move, by minute.
SELECT part, 'minute' AS what, to_queue AS queue_number, at_ms div {MINUTE_MS} AS at, 1 AS came,
  1 AS messages, 1 AS changes
FROM irregular_events WHERE code = {Moved}
