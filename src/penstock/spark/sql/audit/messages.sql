-- A row for each message with a regular life: those of the parts that are judged, and those of
-- other parts that their checks look at.
--
--   message    its number
--   part_number
--              of its part among those that are judged, null if it is of another
--   queue, term, events, pushed, claimed, deleted, pushed_ms, expires_at_ms, claimed_ms,
--   deadline_ms, deleted_ms, group_hash, dedup_hash
--              as in `folds`
--   emptied_before, fifo, dedup_per_group
--              of the period in which its last event is
--   plain      its queue was not emptied before it ended, and it did not end before, in a sealed
--              part: if not, its events are looked at one by one
SELECT message, part_number, folds.queue AS queue, term, events, pushed, claimed, deleted,
  pushed_ms, expires_at_ms, claimed_ms, deadline_ms, deleted_ms, group_hash, dedup_hash,
  coalesce(emptied_before, 0) AS emptied_before, fifo, dedup_per_group,
  coalesce(pushed > coalesce(last_emptied, 0) AND coalesce(max_receives, 1) > 0
    AND message NOT IN (SELECT message FROM ended_before), false) AS plain
FROM folds LEFT JOIN spanned_periods AS periods
  ON periods.queue = folds.queue AND span = span_of(coalesce(deleted, claimed, pushed))
    AND coalesce(deleted, claimed, pushed) >= from_sequence
    AND coalesce(deleted, claimed, pushed) < to_sequence
WHERE regular
