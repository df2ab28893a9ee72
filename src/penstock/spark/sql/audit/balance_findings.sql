-- Findings of `nothing lost`: what a queue held in each time between two emptyings, beside what the
-- purge, the removal or the engine counted at its end.
--
-- Where the journal has lost its beginning, every message that lived then and still lives has an
-- event: its content was carried. Those with events count as held from the beginning. A first
-- purge may have ended others without naming them, so it may count more.
--
--   check         which check failed, by its name in `CHECKS`
--   store, shard  whose journal
--   message       null: the finding is about no message
--   queue         the queue's number
--   sequence      the purge or removal, 0 if it is about the end of the journal
--   at_ms         null: not known
--   detail        the finding in words
WITH emptied AS (
  SELECT store, shard, queue, sequence, kind, count, row_number() OVER (
    PARTITION BY store, shard, queue ORDER BY sequence) - 1 AS emptied_before
  FROM queue_changes WHERE kind IN ('QueuePurged', 'QueueRemoved')
), summed AS (
  SELECT store, shard, queue, emptied_before, sum(held) AS held, sum(held_before) AS held_before
  FROM (SELECT store, shard, queue, emptied_before, held, held_before FROM balances
    -- A queue without any event of a message is compared too.
    UNION ALL SELECT store, shard, queue, emptied_before, 0, 0 FROM periods)
  GROUP BY store, shard, queue, emptied_before
), ended AS (
  SELECT coalesce(summed.store, emptied.store) AS store,
    coalesce(summed.shard, emptied.shard) AS shard,
    coalesce(summed.queue, emptied.queue) AS queue, coalesce(held, 0) AS held,
    coalesce(held_before, 0) AS held_before, sequence, kind, count,
    coalesce(summed.emptied_before, emptied.emptied_before) = 0 AS is_first
  FROM summed FULL JOIN emptied ON summed.store = emptied.store AND summed.shard = emptied.shard
    AND summed.queue = emptied.queue AND summed.emptied_before = emptied.emptied_before
), compared AS (
  SELECT ended.store AS store, ended.shard AS shard, ended.queue AS queue, sequence, kind, count,
    name, coalesce(removed, 0) AS removed,
    is_first AND first_entry > 1 AND created_entry IS NULL AS from_before,
    CAST(held + CASE WHEN first_entry > 1 THEN held_before ELSE 0 END AS bigint) AS held
  FROM ended
  JOIN stores ON stores.store = ended.store
  LEFT JOIN queue_rules AS queues ON queues.store = ended.store AND queues.shard = ended.shard
    AND queues.queue = ended.queue
)
SELECT 'nothing lost' AS check, store, shard, CAST(NULL AS bigint) AS message,
  queue, coalesce(sequence, 0) AS sequence, CAST(NULL AS bigint) AS at_ms,
  CASE WHEN kind IS NULL AND counted IS NULL
      THEN concat(CAST(-held AS string), ' more messages left the queue than came')
    WHEN kind IS NULL THEN concat('the engine holds ', CAST(counted AS string),
      ', the journal ', CAST(held AS string))
    ELSE concat(kind, ' of ', CAST(count AS string), ' messages where the journal has ',
      CAST(held AS string)) END AS detail
FROM compared
-- The name of a removed queue may have been given to another.
LEFT JOIN engine ON engine.name = compared.name AND removed = 0
WHERE CASE WHEN kind IS NULL THEN held < 0 OR held <> counted
  WHEN from_before THEN held > count
  ELSE held <> count END
