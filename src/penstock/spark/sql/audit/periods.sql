-- A row for each period of a queue: a range of the journal in which nothing that a check needs to
-- know of the queue changes. The first begins at 0, and each ends where the next begins. Where the
-- journal has lost its beginning, the first settings in it apply before that too, unless they were
-- given by a change.
--
--   store, shard, queue_key, queue
--                               whose
--   from_sequence, to_sequence  where the period begins, and where the next one does
--   last_emptied                when a purge or removal last emptied the queue, null if never
--   emptied_before              how many times it had been emptied
--   empty_at                    when it is emptied next
--   settings_known              whether the settings in this period are known
--   max_receives                its limit in this period, null if it has none
--   strict, fifo, dedup_per_group, created_entry
--                               as in `queue_rules`
WITH bounds AS (
  SELECT queue_key, sequence, kind, has_settings FROM queue_changes
  UNION ALL
  SELECT queue_key, 0, NULL, false FROM queue_rules
), cut AS (
  SELECT queue_key, sequence AS from_sequence,
    max(if(kind IN ('QueuePurged', 'QueueRemoved'), sequence, NULL)) OVER of_queue AS last_emptied,
    count(if(kind IN ('QueuePurged', 'QueueRemoved'), 1, NULL)) OVER of_queue AS emptied_before,
    min(if(kind IN ('QueuePurged', 'QueueRemoved'), sequence, NULL)) OVER (
      PARTITION BY queue_key ORDER BY sequence ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)
      AS empty_at,
    coalesce(max(if(has_settings, sequence, NULL)) OVER of_queue,
      min(if(has_settings, sequence, NULL)) OVER (PARTITION BY queue_key)) AS settings_at
  FROM bounds WINDOW of_queue AS (PARTITION BY queue_key ORDER BY sequence)
), described AS (
  SELECT rules.store, rules.shard, cut.queue_key, rules.queue, from_sequence, last_emptied,
    emptied_before, empty_at, settings.sequence IS NOT NULL AS settings_known,
    settings.max_receives, strict, rules.fifo, rules.dedup_per_group, rules.created_entry
  FROM cut JOIN queue_rules AS rules ON rules.queue_key = cut.queue_key
  LEFT JOIN queue_changes AS settings ON settings.queue_key = cut.queue_key
    AND settings.sequence = settings_at AND (settings_at <= from_sequence OR known_from_start)
), compared AS (
  SELECT *, named_struct('a', last_emptied, 'b', emptied_before, 'c', settings_known,
    'd', max_receives) AS here FROM described
), changed AS (
  SELECT *, lag(here) OVER (PARTITION BY queue_key ORDER BY from_sequence) AS before FROM compared
)
SELECT * EXCEPT (here, before), coalesce(lead(from_sequence) OVER (
  PARTITION BY queue_key ORDER BY from_sequence), {NO_LIMIT}) AS to_sequence
FROM changed WHERE from_sequence = 0 OR NOT before <=> here
