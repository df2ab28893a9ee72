-- Findings of `order in the group`. A stay is a message's time in a queue; stays are in the order
-- in which they began, since a move gives a message the next rank. A claim may begin when every
-- earlier stay of the group has ended, or in one pull with it. A message whose group is not known,
-- because its push is not in the journal, is left out.
--
--   check      which check failed, by its name in `CHECKS`
--   part_number, message
--              the number of its part among those that are judged, and its own
--   queue      the queue's number
--   sequence   the claim that breaks the check
--   at_ms      when it happened
--   detail     the finding in words
WITH moments AS (
  SELECT message, sequence AS entered, coalesce(to_queue, queue) AS queue,
    CASE WHEN kind = 'Pushed' THEN coalesce(group_hash, 0) ELSE group_before END AS group_hash,
    sequence AS last_sequence, CAST(NULL AS bigint) AS left_at
  FROM fifo_events WHERE kind IN ('Pushed', 'Moved')
  UNION ALL
  SELECT message, entered, NULL, NULL, sequence, CASE WHEN {LEFT_QUEUE} THEN sequence END
  FROM fifo_events WHERE entered IS NOT NULL
), stays AS (
  SELECT max(queue) AS queue, max(group_hash) AS group_hash, entered,
    max(last_sequence) AS last_sequence, min(left_at) AS left_at
  FROM moments GROUP BY message, entered
  UNION ALL
  SELECT queue, coalesce(group_hash, 0), pushed, coalesce(deleted, claimed, pushed), deleted
  FROM messages WHERE plain AND fifo
), steps AS (
  SELECT stays.queue AS queue, group_hash, entered, 1 AS after,
    CAST(NULL AS bigint) AS message, CAST(NULL AS int) AS part_number,
    CAST(NULL AS bigint) AS sequence, CAST(NULL AS bigint) AS at_ms,
    coalesce(left_at, to_sequence, {NO_LIMIT}) AS left_at
  FROM stays ASOF LEFT JOIN emptyings
    ON emptyings.queue = stays.queue AND last_sequence >= from_sequence
  UNION ALL
  SELECT queue, group_before, entered, 0, message, part_number, sequence, at_ms, NULL
  FROM fifo_events WHERE kind = 'Claimed' AND entered IS NOT NULL
  UNION ALL
  SELECT queue, coalesce(group_hash, 0), pushed, 0, message, part_number, claimed, claimed_ms, NULL
  FROM messages WHERE plain AND fifo AND claimed IS NOT NULL
), ordered AS (
  SELECT *, max(left_at) OVER (PARTITION BY group_hash, queue ORDER BY entered, after
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
  FROM steps WHERE group_hash IS NOT NULL
), claims AS (
  SELECT *, lag(entered) OVER (PARTITION BY group_hash, queue, sequence >> {INDEX_BITS}
    ORDER BY sequence) AS entered_before
  FROM ordered WHERE after = 0
)
SELECT 'order in the group' AS "check", part_number, message, queue, sequence, at_ms,
  'claimed before an earlier message of its group had left' AS detail
FROM claims
WHERE part_number IS NOT NULL
  AND ((entered_before IS NULL AND sequence < free_from) OR entered < entered_before)
