-- Findings of `nothing lost`: what a queue held in each time between two emptyings, beside what the
-- purge, the removal or the engine counted at its end.
--
--   check      which check failed, by its name in `CHECKS`
--   shard_key  hash of the store and the shard
--   message    its number, null if the finding is about no message
--   queue      the queue's number
--   sequence   the event that breaks the check, or where the gap begins
--   at_ms      when it happened, null if not known
--   detail     the finding in words
WITH emptied AS (
  SELECT shard_key, queue, sequence, kind, count, row_number() OVER (
    PARTITION BY shard_key, queue ORDER BY sequence) - 1 AS emptied_before
  FROM {queue_changes} WHERE kind IN ('QueuePurged', 'QueueRemoved')
), compared AS (
  SELECT coalesce(balances.shard_key, emptied.shard_key) AS shard_key,
    coalesce(balances.queue, emptied.queue) AS queue, coalesce(held, 0) AS held,
    sequence, kind, count
  FROM {balances} AS balances FULL JOIN emptied ON balances.shard_key = emptied.shard_key
    AND balances.queue = emptied.queue AND balances.emptied_before = emptied.emptied_before
)
SELECT 'nothing lost' AS `check`, compared.shard_key AS shard_key, CAST(NULL AS bigint) AS message,
  compared.queue AS queue, coalesce(sequence, 0) AS sequence, CAST(NULL AS bigint) AS at_ms,
  CASE WHEN kind IS NULL AND counted IS NULL
      THEN concat(CAST(-held AS string), ' more messages left the queue than came')
    WHEN kind IS NULL THEN concat('the engine holds ', CAST(counted AS string),
      ', the journal ', CAST(held AS string))
    ELSE concat(kind, ' of ', CAST(count AS string), ' messages where the journal has ',
      CAST(held AS string)) END AS detail
FROM compared
JOIN {shards} AS shards ON shards.shard_key = compared.shard_key
JOIN {stores} AS stores ON stores.store = shards.store
LEFT JOIN {queues} AS queues ON queues.shard_key = compared.shard_key
  AND queues.queue = compared.queue
-- The name of a removed queue may have been given to another.
LEFT JOIN {engine} AS engine ON engine.name = queues.name AND removed = 0
WHERE first_entry = 1
  AND CASE WHEN kind IS NULL THEN held < 0 OR held <> counted ELSE held <> count END
