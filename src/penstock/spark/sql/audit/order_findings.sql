-- Findings of `order in the group`. A stay is a message's time in a queue; stays are in the order in
-- which they began, since a move gives a message the next rank. A claim may begin when every earlier
-- stay of the group has ended, or in one pull with it. A message whose group is not known, because its
-- push is not in the journal, is left out. Columns as in `message_findings`.
WITH fifo AS (
  SELECT DISTINCT queue_key FROM periods WHERE fifo
), lives AS (
  SELECT part, key, shiftright(key, {MESSAGE_BITS}) * {QUEUES} + queue_number AS queue_key,
    queue_number AS queue, coalesce(`group`, '') AS `group`, pushed, claimed, deleted,
    first_pulled_at_ms
  FROM near_messages WHERE regular
), regular AS (
  SELECT * FROM lives LEFT SEMI JOIN fifo USING (queue_key)
), placed AS (
  SELECT *, shiftright(key, {MESSAGE_BITS}) * {QUEUES} + queue AS queue_key FROM near_events
  WHERE code <> {Carried}
), known AS (
  SELECT part, key, queue_key, queue, sequence, code, at_ms, to_queue, `group`,
    last(if(code IN ({Pushed}, {Moved}), sequence, NULL), true) OVER earlier AS entered,
    last(if(code = {Pushed}, coalesce(`group`, ''), NULL), true) OVER earlier AS group_before
  FROM placed LEFT SEMI JOIN fifo USING (queue_key)
  WINDOW earlier AS (PARTITION BY part, key ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), moments AS (
  SELECT part, key, sequence AS entered,
    shiftright(key, {MESSAGE_BITS}) * {QUEUES} + coalesce(to_queue, queue) AS queue_key,
    if(code = {Pushed}, coalesce(`group`, ''), group_before) AS `group`,
    sequence AS last_sequence, CAST(NULL AS bigint) AS left_at
  FROM known WHERE code IN ({Pushed}, {Moved})
  UNION ALL
  SELECT part, key, entered, NULL, NULL, sequence, if({LEFT_QUEUE}, sequence, NULL)
  FROM known WHERE entered IS NOT NULL
), stays AS (
  SELECT max(queue_key) AS queue_key, max(`group`) AS `group`, entered,
    max(last_sequence) AS last_sequence, min(left_at) AS left_at
  FROM moments GROUP BY part, key, entered
  UNION ALL
  SELECT queue_key, `group`, pushed, coalesce(deleted, claimed, pushed), deleted FROM regular
), steps AS (
  SELECT stays.queue_key, `group`, entered, 1 AS after, CAST(NULL AS bigint) AS part,
    CAST(NULL AS bigint) AS key, CAST(NULL AS bigint) AS queue, CAST(NULL AS bigint) AS sequence,
    CAST(NULL AS bigint) AS at_ms, coalesce(left_at, empty_at, {NO_LIMIT}) AS left_at
  FROM stays LEFT JOIN periods ON periods.queue_key = stays.queue_key
    AND last_sequence >= from_sequence AND last_sequence < to_sequence
  UNION ALL
  SELECT queue_key, group_before, entered, 0, part, key, queue, sequence, at_ms, NULL
  FROM known WHERE code = {Claimed} AND entered IS NOT NULL
  UNION ALL
  SELECT queue_key, `group`, pushed, 0, part, key, queue, claimed, first_pulled_at_ms, NULL
  FROM regular WHERE claimed IS NOT NULL
), ordered AS (
  SELECT *, max(left_at) OVER (PARTITION BY queue_key, `group` ORDER BY entered, after
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
  FROM steps WHERE `group` IS NOT NULL
), claims AS (
  SELECT *, lag(entered) OVER (PARTITION BY queue_key, `group`, sequence div {ENTRY_SPAN}
    ORDER BY sequence) AS entered_before
  FROM ordered WHERE after = 0
)
SELECT 'order in the group' AS check, part, key, queue, sequence, at_ms,
  'claimed before an earlier message of its group had left' AS detail
FROM claims LEFT SEMI JOIN judged_parts USING (part)
WHERE (entered_before IS NULL AND sequence < free_from) OR entered < entered_before
