-- A row for each message that a purge or a removal of its queue ended, of those that were pushed once
-- and stayed in one queue.
--
--   message  its number
--   emptied  the sequence of that purge or removal
WITH standing AS (
  SELECT message, queue, last_sequence, push_rank AS rank FROM queried_folds WHERE unmoved
  UNION ALL
  SELECT message, queue, last_sequence, NULL FROM regular_folds
)
SELECT message, {EMPTYING}.sequence AS emptied
FROM standing JOIN queues ON queues.queue_number = standing.queue
WHERE ends <> [] AND emptied IS NOT NULL
