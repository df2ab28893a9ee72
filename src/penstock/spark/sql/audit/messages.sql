-- A row for each message, with whether its life is plain: pushed, perhaps claimed once, perhaps
-- deleted by that claim, all in one queue and term. Each of the three events is there at most once
-- in `folded`; that the count agrees shows that there is no other event.
--
--   shard_key  hash of the store and the shard
--   message    its number
--   queue, term, pushed, claimed, deleted, pushed_ms, group_hash, dedup_hash
--              as in `folded`
--   emptied_before, fifo, dedup_per_group
--              of the period in which its last event is
--   plain      if not, its events are looked at one by one
SELECT shard_key, message, queue, term, pushed, claimed, deleted, pushed_ms, group_hash, dedup_hash,
  coalesce(emptied_before, 0) AS emptied_before, fifo, dedup_per_group,
  coalesce(events = 1 + CASE WHEN claimed IS NULL THEN 0 ELSE 1 END
      + CASE WHEN deleted IS NULL THEN 0 ELSE 1 END
    AND (claimed IS NULL OR claimed > pushed) AND (deleted IS NULL OR deleted > claimed)
    AND queue = least_queue AND term = least_term
    AND pushed > coalesce(last_emptied, 0) AND coalesce(max_receives, 1) > 0, false) AS plain
FROM {folded} AS folded LEFT JOIN {periods} AS periods
  ON queue_key = xxhash64(shard_key, queue)
  AND coalesce(deleted, claimed, pushed) >= from_sequence
  AND coalesce(deleted, claimed, pushed) < to_sequence
