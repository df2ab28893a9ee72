-- A row for each queue and minute in which it changed. Columns: docs/formats/lake.md.
WITH begun AS (
  SELECT store, min(minute) AS first_minute FROM (
    SELECT store, minute FROM part_minutes
    UNION ALL SELECT store, at_ms // {BUCKET_MS} FROM queue_events WHERE kind <> 'Damaged')
  GROUP BY store
), buckets AS (
  SELECT store, shard, queue_number, coalesce(minute, first_minute) AS minute,
    sum(messages) AS messages, sum(in_flight) AS in_flight, sum(pushes) AS pushed,
    sum(deletes) AS deleted
  FROM part_minutes JOIN begun USING (store) WHERE changes > 0
  GROUP BY store, shard, queue_number, coalesce(minute, first_minute)
)
SELECT store, shard, queue, queue_number,
  make_timestamptz(minute * {BUCKET_MS} * 1000) AS minute,
  sum(messages) OVER line AS messages, sum(in_flight) OVER line AS in_flight, pushed, deleted
FROM buckets LEFT JOIN queues USING (store, shard, queue_number)
WINDOW line AS (PARTITION BY store, shard, queue_number ORDER BY buckets.minute
  ROWS UNBOUNDED PRECEDING)
ORDER BY store, shard, queue_number, buckets.minute
