-- A row for each claim of the parts that are made: what `attempts` and the tables that count claims
-- show of it, with the number of its queue. That of a simple life is in `folds`.
--
--   message, part_number  whose, and of which of the parts that are made
--   the other columns     as in `attempts`
SELECT * FROM eventful_claims
UNION ALL
SELECT message, part_number, queue, 1, holder, attempt_id, claimed_ms, deleted_ms,
  CASE WHEN deleted IS NOT NULL THEN 'deleted' ELSE 'open' END, deadline_ms, 0
FROM folds WHERE simple AND claimed IS NOT NULL
