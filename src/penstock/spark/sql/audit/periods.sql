-- A row for each period of a queue: a range of the journal in which nothing that a check needs to
-- know of the queue changes. The first begins at 0, and each ends where the next begins. Where the
-- journal has lost its beginning, the first settings in it apply before that too, unless they were
-- given by a change.
--
--   store, shard, queue         whose
--   from_sequence               where the period begins
--   last_emptied                when a purge or removal last emptied the queue, null if never
--   emptied_before              how many times it had been emptied
--   settings_known              whether the settings in this period are known
--   max_receives                its limit in this period, null if it has none
--   strict, fifo, dedup_per_group
--                               as in `known_queues`
--   created_entry               as in `known_queues`
--   to_sequence                 where the next period begins
WITH bounds AS (
  SELECT store, shard, queue, sequence, kind, has_settings FROM queue_changes
  UNION ALL
  SELECT store, shard, queue, 0, NULL, false FROM known_queues
), cut AS (
  SELECT store, shard, queue, sequence AS from_sequence,
    max(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN sequence END)
      OVER of_queue AS last_emptied,
    count(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN 1 END)
      OVER of_queue AS emptied_before,
    coalesce(max(CASE WHEN has_settings THEN sequence END) OVER of_queue,
      min(CASE WHEN has_settings THEN sequence END) OVER (PARTITION BY store, shard, queue))
      AS settings_at
  FROM bounds WINDOW of_queue AS (PARTITION BY store, shard, queue ORDER BY sequence)
), described AS (
  SELECT cut.store AS store, cut.shard AS shard, cut.queue AS queue, from_sequence,
    last_emptied, emptied_before, settings.sequence IS NOT NULL AS settings_known,
    settings.max_receives AS max_receives, strict, queues.fifo AS fifo,
    queues.dedup_per_group AS dedup_per_group, queues.created_entry AS created_entry
  FROM cut
  JOIN known_queues AS queues ON queues.store = cut.store AND queues.shard = cut.shard
    AND queues.queue = cut.queue
  LEFT JOIN queue_changes AS settings ON settings.store = cut.store AND settings.shard = cut.shard
    AND settings.queue = cut.queue AND settings.sequence = settings_at
    AND (settings_at <= from_sequence OR known_from_start)
), compared AS (
  SELECT *, lag((last_emptied, emptied_before, settings_known, max_receives)) OVER (
    PARTITION BY store, shard, queue ORDER BY from_sequence) AS before
  FROM described
)
SELECT * EXCLUDE (before), coalesce(lead(from_sequence) OVER (
  PARTITION BY store, shard, queue ORDER BY from_sequence), {NO_LIMIT}) AS to_sequence
FROM compared
WHERE from_sequence = 0
  OR before IS DISTINCT FROM (last_emptied, emptied_before, settings_known, max_receives)
