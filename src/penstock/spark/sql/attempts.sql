-- A row for each claim of a message of the parts that are made. Columns: docs/formats/lake.md.
--
-- The one claim of a regular life is in its row of `messages`. A claim that no event ended has ended
-- with its message, if a purge or a removal of the queue ended that.
WITH irregular AS (
  SELECT part, key, epoch, max(queue) AS queue_number, max(holder) AS holder,
    max(attempt_id) AS attempt_id,
    min(if(code = {Claimed}, at_ms, NULL)) AS started_at_ms,
    max(if({CLAIM_ENDED}, at_ms, NULL)) AS ended_at_ms,
    max_by(CAST(code AS int), if({CLAIM_ENDED}, sequence, NULL)) AS end_code,
    max_by(deadline_ms, if(deadline_ms IS NULL, NULL, sequence)) AS deadline_ms,
    count_if(code = {Extended}) AS extends
  FROM irregular_events
  WHERE code IN ({Claimed}, {Extended}) OR {CLAIM_ENDED} GROUP BY part, key, epoch
), claims AS (
  SELECT irregular.*, state, messages.ended_at_ms AS message_ended_at_ms
  FROM irregular JOIN messages ON messages.part = irregular.part AND messages.key = irregular.key
  WHERE NOT regular AND NOT dropped
  UNION ALL
  SELECT part, key, 1, queue_number, holder, attempt_id, first_pulled_at_ms,
    if(deleted IS NULL, NULL, ended_at_ms), if(deleted IS NULL, NULL, {Deleted}), deadline_ms, 0,
    state, ended_at_ms
  FROM messages WHERE regular AND claimed IS NOT NULL AND NOT dropped
), ended AS (
  SELECT *, CASE end_code WHEN {Deleted} THEN 'deleted' WHEN {Released} THEN 'released'
      WHEN {ClaimExpired} THEN 'timed out' WHEN {Lost} THEN 'lost'
      ELSE if(state IN ('purged', 'removed'), state, 'open') END AS ended,
    if(end_code IS NULL AND state IN ('purged', 'removed'), message_ended_at_ms, ended_at_ms)
      AS until_ms
  FROM claims
)
SELECT journals.store, journals.shard, {MESSAGE} AS message,
  concat(prefix, lpad(lower(hex({MESSAGE})), 12, '0')) AS message_id,
  coalesce(queue, concat('#', ended.queue_number)) AS queue, ended.queue_number, epoch, holder,
  attempt_id, started_at_ms, timestamp_millis(started_at_ms) AS started_at, until_ms AS ended_at_ms,
  ended, deadline_ms, extends, until_ms - started_at_ms AS hold_ms, key, part
FROM ended JOIN journals ON journals.journal = shiftright(key, {MESSAGE_BITS})
LEFT JOIN known_queues ON known_queues.queue_key = shiftright(key, {MESSAGE_BITS}) * {QUEUES} + ended.queue_number
