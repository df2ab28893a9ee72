-- A row for each message of a part: a fold of its events, then its queues' names, then its state.
-- Columns: docs/formats/lake.md.
--
-- What a regular life comes to is known from its row in `folds` and its push; only the others are
-- folded here. The result is the same if no life is held to be regular.
--
-- A message from before the beginning of the journal has events, since its content was carried, but
-- no push. Whether it was moved before is not known: in a dead-letter queue it counts as dead.
WITH folded AS MATERIALIZED (
  SELECT message,
    arg_min(queue, sequence) AS queue_number,
    arg_max(coalesce(to_queue, queue), sequence) AS held_in_number,
    arg_max(coalesce(rank, message), sequence)
      FILTER (WHERE kind IN ('Pushed', 'Moved')) AS rank,
    max("group") AS "group", max(dedup_id) AS dedup_id, max(priority) AS priority,
    max(body_bytes) AS body_bytes,
    min(at_ms) FILTER (WHERE kind = 'Pushed') AS pushed_at_ms,
    arg_min(visible_at_ms, sequence) FILTER (WHERE kind = 'Pushed') AS visible_at_ms,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS first_pulled_at_ms,
    max(at_ms) FILTER (WHERE kind = 'Claimed') AS last_pulled_at_ms,
    count_if(kind = 'Claimed') AS claims,
    count_if(kind = 'Extended') AS extends,
    count_if(kind = 'Released') AS releases,
    count_if(kind = 'ClaimExpired') AS timeouts,
    count_if(kind = 'Moved') AS moves,
    count_if(kind = 'Departed' OR (kind = 'Moved' AND dead)) AS dead_letters,
    arg_max(dead, sequence) FILTER (WHERE kind = 'Moved') AS moved_dead,
    arg_max(kind, sequence) FILTER (WHERE kind <> 'Carried') AS last_kind,
    arg_max(coalesce(visible_at_ms, 0), sequence)
      FILTER (WHERE kind IN ('Pushed', 'Released', 'DelayEnded')) AS delayed_until_ms,
    arg_min(kind, sequence) FILTER (WHERE {ENDED}) AS end_kind,
    min(at_ms) FILTER (WHERE {ENDED}) AS end_at_ms,
    count(*) AS events,
    max(sequence) AS last_sequence
  FROM events WHERE message IN (SELECT message FROM folds WHERE NOT regular) GROUP BY message
  UNION ALL
  SELECT message, folds.queue, folds.queue, message, "group", dedup_id, priority, body_bytes,
    folds.pushed_ms, visible_at_ms, claimed_ms, claimed_ms, CAST(claimed IS NOT NULL AS int),
    0, 0, 0, 0, 0, NULL,
    CASE WHEN deleted IS NOT NULL THEN 'Deleted' WHEN claimed IS NOT NULL THEN 'Claimed'
      ELSE 'Pushed' END,
    0, CASE WHEN deleted IS NOT NULL THEN 'Deleted' END, deleted_ms, folds.events, last_sequence
  FROM folds JOIN events USING (message) WHERE regular AND kind = 'Pushed'
), dead_letter_queues AS (
  SELECT DISTINCT dead_letter FROM queues WHERE dead_letter IS NOT NULL
), emptied AS (
  -- The first purge or removal after the last event of a message that has no end of its own.
  SELECT message, list_filter(ends, lambda one: one.sequence > last_sequence
    AND (one.before IS NULL OR coalesce(rank, message) < one.before))[1] AS emptied
  FROM folded JOIN queues ON queues.queue_number = held_in_number
  WHERE end_kind IS NULL AND ends <> []
), placed AS (
  SELECT folded.*, emptied, coalesce(pushed_to.queue, concat('#', folded.queue_number)) AS queue,
    coalesce(held.queue, concat('#', held_in_number)) AS held_in,
    pushed_at_ms IS NULL AND moved_dead IS NULL
      AND dead_letter_queues.dead_letter IS NOT NULL AS found_dead,
    coalesce(last_kind = 'Departed', false) AS departed
  FROM folded
  LEFT JOIN emptied ON emptied.message = folded.message
  LEFT JOIN queues AS pushed_to ON pushed_to.queue_number = folded.queue_number
  LEFT JOIN queues AS held ON held.queue_number = held_in_number
  LEFT JOIN dead_letter_queues ON dead_letter_queues.dead_letter = held.queue
), judged AS (
  SELECT *,
    CASE WHEN end_kind IS NOT NULL THEN lower(CAST(end_kind AS varchar))
      WHEN departed THEN 'departed'
      WHEN emptied.kind = 'QueuePurged' THEN 'purged'
      WHEN emptied.kind = 'QueueRemoved' THEN 'removed'
      WHEN moved_dead OR found_dead THEN 'dead'
      ELSE 'live' END AS state,
    CASE WHEN departed THEN end_at_ms ELSE coalesce(end_at_ms, emptied.at_ms) END AS ended_at_ms
  FROM placed
)
SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, held_in,
  held_in_number, "group", dedup_id, priority, body_bytes, pushed_at_ms,
  make_timestamptz(pushed_at_ms * 1000) AS pushed_at, visible_at_ms, first_pulled_at_ms,
  last_pulled_at_ms, claims, extends, releases, timeouts, moves, dead_letters, state,
  CASE WHEN state NOT IN ('live', 'dead') THEN NULL
    WHEN last_kind IN ('Claimed', 'Extended') THEN 'in_flight'
    WHEN last_kind IN ('Pushed', 'Released') AND delayed_until_ms > 0 THEN 'delayed'
    ELSE 'visible' END AS standing,
  ended_at_ms,
  first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS wait_ms,
  ended_at_ms - pushed_at_ms AS age_ms,
  events, last_sequence, dropped
FROM judged, part
