-- A row for each period of a queue: from the beginning of the journal, or one event of the queue,
-- to the next. Where the journal has lost its beginning, the first settings it gives are in force
-- before that too, unless a change gave them.
--
--   queue_key                   hash of shard_key and queue
--   from_sequence, to_sequence  the period, its end not included
--   last_emptied                when a purge or removal last emptied the queue, null if never
--   emptied_before              how many times it had been emptied
--   settings_known              whether the settings in this period are known
--   max_receives                its limit in this period, null if it has none
--   strict, fifo, dedup_per_group
--                               as in `queues`
WITH bounds AS (
  SELECT shard_key, queue, sequence, kind, has_settings FROM {queue_changes}
  UNION ALL
  SELECT shard_key, queue, 0, NULL, false FROM {queues}
), cut AS (
  SELECT shard_key, queue, sequence AS from_sequence,
    coalesce(lead(sequence) OVER of_queue, 9223372036854775807) AS to_sequence,
    max(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN sequence END)
      OVER of_queue AS last_emptied,
    count(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN 1 END)
      OVER of_queue AS emptied_before,
    coalesce(max(CASE WHEN has_settings THEN sequence END) OVER of_queue,
      min(CASE WHEN has_settings THEN sequence END) OVER (PARTITION BY shard_key, queue))
      AS settings_at
  FROM bounds WINDOW of_queue AS (PARTITION BY shard_key, queue ORDER BY sequence)
)
SELECT queue_key, from_sequence, to_sequence, last_emptied, emptied_before,
  settings.sequence IS NOT NULL AS settings_known, settings.max_receives,
  strict, queues.fifo, queues.dedup_per_group
FROM cut
JOIN {queues} AS queues ON queues.shard_key = cut.shard_key AND queues.queue = cut.queue
LEFT JOIN {queue_changes} AS settings ON settings.shard_key = cut.shard_key
  AND settings.queue = cut.queue AND settings.sequence = settings_at
  AND (settings_at <= from_sequence OR known_from_start)
