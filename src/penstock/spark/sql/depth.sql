-- A row for each queue and minute in which it changed. Columns: docs/formats/lake.md.
WITH begun AS (
  SELECT store, min(minute) AS first_minute FROM (
    SELECT store, at AS minute FROM sums WHERE what = 'minute'
    UNION ALL SELECT store, at_ms div {MINUTE_MS} FROM queue_events WHERE kind <> 'Damaged')
  GROUP BY store
), buckets AS (
  SELECT store, shard, queue_number, coalesce(at, first_minute) AS minute,
    sum(messages) AS messages, sum(in_flight) AS in_flight, sum(pushes) AS pushed,
    sum(deletes) AS deleted
  FROM sums JOIN begun USING (store) WHERE what = 'minute' AND changes > 0
  GROUP BY store, shard, queue_number, coalesce(at, first_minute)
)
SELECT store, shard, queue, queue_number, timestamp_millis(buckets.minute * {MINUTE_MS}) AS minute,
  coalesce(sum(messages) OVER line, 0) AS messages, coalesce(sum(in_flight) OVER line, 0) AS in_flight,
  coalesce(pushed, 0) AS pushed, coalesce(deleted, 0) AS deleted
FROM buckets JOIN queues USING (store, shard, queue_number)
WINDOW line AS (PARTITION BY store, shard, queue_number ORDER BY buckets.minute
  ROWS UNBOUNDED PRECEDING)
