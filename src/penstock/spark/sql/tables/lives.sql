-- A row for each message of the parts that are made: what `messages` and the tables that count
-- messages show of it, with the numbers of its queues. Of a life that is simple, as most are, its row
-- in `folds` says all: it is regular, and its message was deleted, or its queue was not emptied since.
--
--   message, part_number  whose, and of which of the parts that are made
--   the other columns     as in `messages`
SELECT * FROM eventful_lives
UNION ALL
SELECT message, part_number, queue, queue, "group", dedup_id, priority, body_bytes,
  first_pushed_ms, NULL, claimed_ms, claimed_ms, CAST(claimed IS NOT NULL AS int), 0, 0, 0, 0, 0,
  CASE WHEN deleted IS NOT NULL THEN 'deleted' ELSE 'live' END,
  CASE WHEN deleted IS NOT NULL THEN NULL WHEN claimed IS NOT NULL THEN 'in_flight'
    ELSE 'visible' END,
  deleted_ms, events, last_sequence
FROM folds WHERE simple
