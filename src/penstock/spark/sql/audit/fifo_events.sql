-- A row for each event of an irregular message in a FIFO queue, with its position before it.
--
--   shard_key     hash of the store and the shard
--   message       its number
--   sequence, kind, queue, at_ms, to_queue, rank, group_hash
--                 the event
--   place         its position in the order of the queue
--   entered       where it was pushed, or moved to this queue
--   group_before  the hash of its group, 0 if it has none, null if not known
SELECT irregular_events.shard_key AS shard_key, message, sequence, kind,
  irregular_events.queue AS queue, at_ms,
  to_queue, rank, group_hash,
  last_value(CASE WHEN kind = 'Pushed' THEN message WHEN kind = 'Moved' THEN rank END)
    IGNORE NULLS OVER earlier AS place,
  last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
    IGNORE NULLS OVER earlier AS entered,
  last_value(CASE WHEN kind = 'Pushed' THEN coalesce(group_hash, 0) END)
    IGNORE NULLS OVER earlier AS group_before
FROM {irregular_events} AS irregular_events JOIN {queues} AS queues
  ON queue_key = xxhash64(irregular_events.shard_key, irregular_events.queue)
WHERE fifo AND kind <> 'Carried'
WINDOW earlier AS (PARTITION BY message, irregular_events.shard_key ORDER BY sequence
  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
