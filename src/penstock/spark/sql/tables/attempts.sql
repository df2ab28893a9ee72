-- A row for each claim of a part. Columns: docs/formats/lake.md.
--
-- The one claim of a regular life is known from its row in `folds`; only those of the others are
-- folded here. The result is the same if no life is held to be regular.
WITH folded AS MATERIALIZED (
  SELECT message, epoch, max(queue) AS queue_number,
    max(holder) AS holder, max(attempt_id) AS attempt_id,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS started_at_ms,
    min(sequence) FILTER (WHERE kind = 'Claimed') AS started,
    max(at_ms) FILTER (WHERE {CLAIM_ENDED}) AS ended_at_ms,
    arg_max(kind, sequence) FILTER (WHERE {CLAIM_ENDED}) AS end_kind,
    arg_max(deadline_ms, sequence)
      FILTER (WHERE kind IN ('Claimed', 'Extended')) AS deadline_ms,
    count_if(kind = 'Extended') AS extends
  FROM events
  WHERE (kind IN ('Claimed', 'Extended') OR {CLAIM_ENDED})
    AND message IN (SELECT message FROM folds WHERE NOT regular)
  GROUP BY message, epoch
  UNION ALL
  SELECT message, 1, folds.queue, holder, attempt_id, claimed_ms, claimed, deleted_ms,
    CASE WHEN deleted IS NOT NULL THEN 'Deleted' END, folds.deadline_ms, 0
  FROM folds JOIN events USING (message) WHERE regular AND kind = 'Claimed'
), emptied AS (
  SELECT message, epoch, list_filter(ends, lambda one: one.sequence > started)[1] AS emptied
  FROM folded JOIN queues USING (queue_number) WHERE end_kind IS NULL AND ends <> []
    -- A purge does not end a claim of a message that has ended.
    AND message NOT IN (SELECT message FROM folds WHERE until < {NO_LIMIT})
), placed AS (
  SELECT folded.*, emptied, coalesce(queue, concat('#', folded.queue_number)) AS queue
  FROM folded LEFT JOIN queues USING (queue_number)
  LEFT JOIN emptied ON emptied.message = folded.message AND emptied.epoch = folded.epoch
)
SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, epoch, holder,
  attempt_id, started_at_ms, make_timestamptz(started_at_ms * 1000) AS started_at,
  coalesce(ended_at_ms, emptied.at_ms) AS ended_at_ms,
  CASE coalesce(CAST(end_kind AS varchar), emptied.kind)
    WHEN 'Deleted' THEN 'deleted' WHEN 'Released' THEN 'released'
    WHEN 'ClaimExpired' THEN 'timed out' WHEN 'Lost' THEN 'lost'
    WHEN 'QueuePurged' THEN 'purged' WHEN 'QueueRemoved' THEN 'removed'
    ELSE 'open' END AS ended,
  deadline_ms, extends, coalesce(ended_at_ms, emptied.at_ms) - started_at_ms AS hold_ms
FROM placed, part
