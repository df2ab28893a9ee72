-- Findings of `one message per dedup id`.
--
--   check      which check failed, by its name in `CHECKS`
--   shard_key  hash of the store and the shard
--   message    its number, null if the finding is about no message
--   queue      the queue's number
--   sequence   the event that breaks the check, or where the gap begins
--   at_ms      when it happened, null if not known
--   detail     the finding in words
WITH pushes AS (
  SELECT shard_key, message, queue, sequence, at_ms, dedup_hash, irregular_events.group_hash, fifo,
    dedup_per_group, emptied_before
  FROM {irregular_events} AS irregular_events LEFT JOIN {periods} AS periods
    ON queue_key = xxhash64(shard_key, queue)
    AND sequence >= from_sequence AND sequence < to_sequence
  WHERE kind = 'Pushed' AND dedup_hash IS NOT NULL
  UNION ALL
  SELECT shard_key, message, queue, pushed, pushed_ms, dedup_hash, group_hash, fifo,
    dedup_per_group, emptied_before
  FROM {messages} WHERE plain AND dedup_hash IS NOT NULL
), compared AS (
  -- A purge of a FIFO queue clears its dedup window. Of a queue whose settings are not known
  -- the narrower window is taken.
  SELECT pushes.*, lag(at_ms) OVER same AS earlier_ms, lag(message) OVER same AS first
  FROM pushes
  WINDOW same AS (PARTITION BY dedup_hash, queue, shard_key,
    CASE WHEN coalesce(fifo, true) THEN emptied_before ELSE 0 END,
    CASE WHEN coalesce(dedup_per_group, true) THEN group_hash END ORDER BY sequence)
)
SELECT 'one message per dedup id' AS `check`, shard_key, message, queue, sequence, at_ms,
  concat('its dedup id made message ', CAST(first AS string), ' ',
    CAST(at_ms - earlier_ms AS string), ' ms before') AS detail
FROM compared WHERE at_ms < earlier_ms + {DEDUP_WINDOW_MS}
