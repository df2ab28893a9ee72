-- A row for each queue and minute with events. Columns: docs/formats/lake.md.
WITH busy AS (
  SELECT store, shard, queue_number, at AS minute, events, pushes, claims, deletes, timeouts
  FROM sums WHERE what = 'minute' AND events > 0
  UNION ALL
  SELECT store, shard, queue, at_ms div {MINUTE_MS}, 1, 0, 0, 0, 0
  FROM queue_events WHERE kind <> 'Damaged'
)
SELECT store, shard, queue, queue_number, timestamp_millis(busy.minute * {MINUTE_MS}) AS minute,
  sum(events) AS events, sum(pushes) AS pushes, sum(claims) AS claims, sum(deletes) AS deletes,
  sum(timeouts) AS timeouts
FROM busy JOIN queues USING (store, shard, queue_number)
GROUP BY store, shard, queue, queue_number, busy.minute
