-- A row for each queue and minute with events. Columns: docs/formats/lake.md.
WITH busy AS (
  SELECT store, shard, queue AS queue_number, at_ms div {BUCKET_MS} AS bucket,
    count(*) AS events, count_if(kind = 'Pushed') AS pushes,
    count_if(kind = 'Claimed') AS claims, count_if(kind = 'Deleted') AS deletes,
    count_if(kind = 'ClaimExpired') AS timeouts
  FROM {events} WHERE kind <> 'Damaged'
  GROUP BY store, shard, queue, at_ms div {BUCKET_MS}
)
SELECT store, shard, queue, queue_number, timestamp_millis(bucket * {BUCKET_MS}) AS minute,
  events, pushes, claims, deletes, timeouts
FROM busy LEFT JOIN {queues} USING (store, shard, queue_number)
