-- A row for each message of a part, and for those of other parts that its checks look at.
--
--   message    its number
--   own        whether it is of the part that is judged
--   queue, term, events, pushed, claimed, deleted, first_pushed_ms, pushed_ms, expires_at_ms,
--   claimed_ms, deadline_ms, deleted_ms, group_hash, dedup_hash, regular
--              as in `folds`
--   emptied_before, fifo, dedup_per_group
--              of the period in which its last event is
--   plain      its life is regular, its queue was not emptied before it ended, and it did not end
--              before, in a sealed part: if not, its events are looked at one by one
SELECT message, own, folds.queue AS queue, term, events, pushed, claimed, deleted, first_pushed_ms,
  pushed_ms, expires_at_ms, claimed_ms, deadline_ms, deleted_ms, group_hash, dedup_hash, regular,
  coalesce(emptied_before, 0) AS emptied_before, fifo, dedup_per_group,
  coalesce(regular AND pushed > coalesce(last_emptied, 0) AND coalesce(max_receives, 1) > 0
    AND message NOT IN (SELECT message FROM ended_before), false) AS plain
FROM folds ASOF LEFT JOIN periods
  ON periods.queue = folds.queue AND coalesce(deleted, claimed, pushed, 0) >= from_sequence
