-- Every event of the messages of the parts that are judged whose lives are not plain. Of a regular life
-- the row in `messages` says all three.
--
--   part, key         the message
--   until_ms          a claim's deadline, or the end of a delay
--   the others        as in `events`
SELECT part, key, sequence, code, at_ms, queue, term, epoch, dead,
  coalesce(deadline_ms, visible_at_ms) AS until_ms, expires_at_ms, to_queue
FROM irregular_events
UNION ALL
SELECT part, key, step.sequence, step.code, step.at_ms, queue_number, term, step.epoch, NULL,
  step.until_ms, step.expires_at_ms, NULL
FROM regular_lives LATERAL VIEW stack(3,
  pushed, {Pushed}, pushed_at_ms, CAST(NULL AS bigint), CAST(NULL AS bigint), expires_at_ms,
  claimed, {Claimed}, first_pulled_at_ms, 1L, deadline_ms, NULL,
  deleted, {Deleted}, ended_at_ms, 1L, NULL, NULL
) step AS sequence, code, at_ms, epoch, until_ms, expires_at_ms
WHERE NOT plain AND step.sequence IS NOT NULL
