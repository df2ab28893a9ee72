-- A row for each time of a queue between two purges or removals.
--
--   queue_key                   hash of shard_key and queue
--   from_sequence, to_sequence  the time, its end not included
WITH ends AS (
  SELECT queue_key, 0 AS sequence FROM {queues}
  UNION ALL
  SELECT xxhash64(shard_key, queue), sequence FROM {queue_changes}
  WHERE kind IN ('QueuePurged', 'QueueRemoved')
)
SELECT queue_key, sequence AS from_sequence, coalesce(lead(sequence) OVER (
  PARTITION BY queue_key ORDER BY sequence), 9223372036854775807) AS to_sequence
FROM ends
