-- A row for each claim of messages whose lives are not simple (`lives`). Columns as in `claims`.
--
-- The one claim of a regular life is known from its row in `folds`; only those of the others are
-- folded here. The result is the same if no life is held to be regular.
WITH irregular AS (
  SELECT message, epoch, max(queue) AS queue_number,
    max(holder) AS holder, max(attempt_id) AS attempt_id,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS started_at_ms,
    min(sequence) FILTER (WHERE kind = 'Claimed') AS started,
    max(at_ms) FILTER (WHERE {CLAIM_ENDED}) AS ended_at_ms,
    arg_max(kind, sequence) FILTER (WHERE {CLAIM_ENDED}) AS end_kind,
    arg_max(deadline_ms, sequence)
      FILTER (WHERE kind IN ('Claimed', 'Extended')) AS deadline_ms,
    count(*) FILTER (WHERE kind = 'Extended') AS extends
  FROM events
  WHERE kind IN ('Claimed', 'Extended') OR {CLAIM_ENDED}
  GROUP BY message, epoch
), folded AS MATERIALIZED (
  SELECT irregular.*, part_number, until FROM irregular JOIN folds USING (message)
  UNION ALL
  SELECT message, 1, queue, holder, attempt_id, claimed_ms, claimed, NULL, NULL, deadline_ms, 0,
    part_number, until
  FROM folds WHERE regular AND claimed IS NOT NULL AND NOT simple
), emptied AS (
  SELECT message, epoch, list_filter(ends, lambda one: one.sequence > started)[1] AS emptying
  FROM folded JOIN queues USING (queue_number) WHERE end_kind IS NULL AND ends <> []
    -- A purge does not end a claim of a message that has ended.
    AND until = {NO_LIMIT}
)
SELECT folded.message, part_number, queue_number, folded.epoch, holder, attempt_id, started_at_ms,
  coalesce(ended_at_ms, emptying.at_ms) AS ended_at_ms,
  CASE coalesce(CAST(end_kind AS varchar), emptying.kind)
    WHEN 'Deleted' THEN 'deleted' WHEN 'Released' THEN 'released'
    WHEN 'ClaimExpired' THEN 'timed out' WHEN 'Lost' THEN 'lost'
    WHEN 'QueuePurged' THEN 'purged' WHEN 'QueueRemoved' THEN 'removed'
    ELSE 'open' END AS ended,
  deadline_ms, extends
FROM folded
LEFT JOIN emptied ON emptied.message = folded.message AND emptied.epoch = folded.epoch
