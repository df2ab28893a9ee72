-- Findings of `nothing lost`: what a queue held in each time between two emptyings, beside what the
-- purge, the removal or the engine counted at its end.
--
-- Where the journal has lost its beginning, every message that lived then and still lives has an
-- event: its content was carried. Those with events count as held from the beginning. A first
-- purge may have ended others without naming them, so it may count more.
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
), ended AS (
  SELECT coalesce(balances.shard_key, emptied.shard_key) AS shard_key,
    coalesce(balances.queue, emptied.queue) AS queue, coalesce(held, 0) AS held,
    coalesce(held_before, 0) AS held_before, sequence, kind, count,
    coalesce(balances.emptied_before, emptied.emptied_before) = 0 AS is_first
  FROM {balances} AS balances FULL JOIN emptied ON balances.shard_key = emptied.shard_key
    AND balances.queue = emptied.queue AND balances.emptied_before = emptied.emptied_before
), compared AS (
  SELECT ended.shard_key AS shard_key, ended.queue AS queue, sequence, kind, count, name,
    coalesce(removed, 0) AS removed,
    is_first AND first_entry > 1 AND created_entry IS NULL AS from_before,
    held + CASE WHEN first_entry > 1 THEN held_before ELSE 0 END AS held
  FROM ended
  JOIN {shards} AS shards ON shards.shard_key = ended.shard_key
  JOIN {stores} AS stores ON stores.store = shards.store
  LEFT JOIN {queues} AS queues ON queues.shard_key = ended.shard_key
    AND queues.queue = ended.queue
)
SELECT 'nothing lost' AS `check`, shard_key, CAST(NULL AS bigint) AS message,
  queue, coalesce(sequence, 0) AS sequence, CAST(NULL AS bigint) AS at_ms,
  CASE WHEN kind IS NULL AND counted IS NULL
      THEN concat(CAST(-held AS string), ' more messages left the queue than came')
    WHEN kind IS NULL THEN concat('the engine holds ', CAST(counted AS string),
      ', the journal ', CAST(held AS string))
    ELSE concat(kind, ' of ', CAST(count AS string), ' messages where the journal has ',
      CAST(held AS string)) END AS detail
FROM compared
-- The name of a removed queue may have been given to another.
LEFT JOIN {engine} AS engine ON engine.name = compared.name AND removed = 0
WHERE CASE WHEN kind IS NULL THEN held < 0 OR held <> counted
  WHEN from_before THEN held > count
  ELSE held <> count END
