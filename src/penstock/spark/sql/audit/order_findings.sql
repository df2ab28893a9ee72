-- Findings of `order in the group`. A stay is a message's time in a queue. A claim may begin when
-- every stay with an earlier place has ended, or in one pull with them. A message whose group is
-- not known, because its push is not in the journal, is left out.
--
--   check      which check failed, by its name in `CHECKS`
--   shard_key  hash of the store and the shard
--   message    its number, null if the finding is about no message
--   queue      the queue's number
--   sequence   the event that breaks the check, or where the gap begins
--   at_ms      when it happened, null if not known
--   detail     the finding in words
WITH moments AS (
  SELECT shard_key, message, sequence AS entered, coalesce(to_queue, queue) AS queue,
    coalesce(rank, message) AS place,
    CASE WHEN kind = 'Pushed' THEN coalesce(group_hash, 0) ELSE group_before END AS group_hash,
    sequence AS last_sequence, CAST(NULL AS bigint) AS left_at
  FROM {fifo_events} WHERE kind IN ('Pushed', 'Moved')
  UNION ALL
  SELECT shard_key, message, entered, NULL, NULL, NULL, sequence,
    CASE WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN sequence END
  FROM {fifo_events} WHERE entered IS NOT NULL
), stays AS (
  SELECT shard_key, max(queue) AS queue, max(group_hash) AS group_hash, max(place) AS place,
    max(last_sequence) AS last_sequence, min(left_at) AS left_at
  FROM moments GROUP BY message, entered, shard_key
  UNION ALL
  SELECT shard_key, queue, coalesce(group_hash, 0), message,
    coalesce(deleted, claimed, pushed), deleted
  FROM {messages} WHERE plain AND fifo
), steps AS (
  SELECT stays.shard_key AS shard_key, queue, group_hash, place, 1 AS after,
    CAST(NULL AS bigint) AS message, CAST(NULL AS bigint) AS sequence,
    CAST(NULL AS bigint) AS at_ms,
    coalesce(left_at, to_sequence, 9223372036854775807) AS left_at
  FROM stays LEFT JOIN {emptyings} AS emptyings
    ON queue_key = xxhash64(stays.shard_key, stays.queue)
    AND last_sequence >= from_sequence AND last_sequence < to_sequence
  UNION ALL
  SELECT shard_key, queue, group_before, place, 0, message, sequence, at_ms, NULL
  FROM {fifo_events} WHERE kind = 'Claimed' AND entered IS NOT NULL
  UNION ALL
  SELECT shard_key, queue, coalesce(group_hash, 0), message, 0, message, claimed, NULL, NULL
  FROM {messages} WHERE plain AND fifo AND claimed IS NOT NULL
), ordered AS (
  SELECT *, max(left_at) OVER (PARTITION BY group_hash, queue, shard_key ORDER BY place, after
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
  FROM steps WHERE group_hash IS NOT NULL
), claims AS (
  SELECT *, lag(place) OVER (PARTITION BY group_hash, queue, shard_key, sequence >> {INDEX_BITS}
    ORDER BY sequence) AS place_before
  FROM ordered WHERE after = 0
)
SELECT 'order in the group' AS `check`, shard_key, message, queue, sequence, at_ms,
  'claimed before an earlier message of its group had left' AS detail
FROM claims
WHERE (place_before IS NULL AND sequence < free_from) OR place < place_before
