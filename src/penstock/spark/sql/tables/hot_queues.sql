-- A row for each queue and minute with events. Columns: docs/formats/lake.md.
WITH busy AS (
  SELECT store, shard, queue_number, minute, events, pushes, claims, deletes, timeouts
  FROM part_minutes WHERE events > 0
  UNION ALL
  SELECT store, shard, queue, at_ms // {BUCKET_MS}, 1, 0, 0, 0, 0
  FROM queue_events WHERE kind <> 'Damaged'
)
SELECT store, shard, queue, queue_number, make_timestamptz(minute * {BUCKET_MS} * 1000) AS minute,
  sum(events) AS events, sum(pushes) AS pushes, sum(claims) AS claims, sum(deletes) AS deletes,
  sum(timeouts) AS timeouts
FROM busy LEFT JOIN queues USING (store, shard, queue_number)
GROUP BY store, shard, queue, queue_number, busy.minute
ORDER BY store, shard, queue_number, busy.minute
