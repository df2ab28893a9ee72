-- A row for each message of the parts that are made: what `messages` and the tables that count
-- messages show of it, with the numbers of its queues. A regular life that has ended, as most have,
-- is one row of `folds`.
--
--   message, part_number  whose, and of which of the parts that are made
--   the other columns     as in `messages`
SELECT * FROM eventful_lives
UNION ALL
SELECT message, part_number, queue, queue, "group", dedup_id, priority, body_bytes,
  first_pushed_ms, NULL, claimed_ms, claimed_ms, 1, 0, 0, 0, 0, 0, 'deleted', NULL, deleted_ms,
  events, last_sequence
FROM folds WHERE regular AND deleted IS NOT NULL
