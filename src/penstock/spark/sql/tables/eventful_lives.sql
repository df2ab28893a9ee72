-- A row for each message of the parts that are made whose life is not simple (`lives`): a fold of its
-- events, then its state. Columns as in `lives`.
--
-- The events of a regular life are known from its row in `folds`; only those of the others are
-- folded here. The result is the same if no life is held to be regular.
--
-- A message from before the beginning of the journal has events, since its content was carried, but
-- no push. Whether it was moved before is not known: in a dead-letter queue it counts as dead.
WITH irregular AS (
  SELECT message,
    arg_min(queue, sequence) AS queue_number,
    arg_max(coalesce(to_queue, queue), sequence) AS held_in_number,
    arg_max(coalesce(rank, message), sequence)
      FILTER (WHERE kind IN ('Pushed', 'Moved')) AS rank,
    arg_min(visible_at_ms, sequence) FILTER (WHERE kind = 'Pushed') AS visible_at_ms,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS first_pulled_at_ms,
    max(at_ms) FILTER (WHERE kind = 'Claimed') AS last_pulled_at_ms,
    count(*) FILTER (WHERE kind = 'Claimed') AS claims,
    count(*) FILTER (WHERE kind = 'Extended') AS extends,
    count(*) FILTER (WHERE kind = 'Released') AS releases,
    count(*) FILTER (WHERE kind = 'ClaimExpired') AS timeouts,
    count(*) FILTER (WHERE kind = 'Moved') AS moves,
    count(*) FILTER (WHERE kind = 'Departed' OR (kind = 'Moved' AND dead)) AS dead_letters,
    arg_max(dead, sequence) FILTER (WHERE kind = 'Moved') AS moved_dead,
    arg_max(kind, sequence) FILTER (WHERE kind <> 'Carried') AS last_kind,
    arg_max(coalesce(visible_at_ms, 0), sequence)
      FILTER (WHERE kind IN ('Pushed', 'Released', 'DelayEnded')) AS delayed_until_ms,
    arg_min(kind, sequence) FILTER (WHERE {ENDED}) AS end_kind,
    min(at_ms) FILTER (WHERE {ENDED}) AS end_at_ms
  FROM events GROUP BY message
), folded AS MATERIALIZED (
  SELECT irregular.*, part_number, "group", dedup_id, priority, body_bytes,
    first_pushed_ms AS pushed_at_ms, events, last_sequence
  FROM irregular JOIN folds ON folds.message = irregular.message
  UNION ALL
  SELECT message, queue, queue, message, NULL, claimed_ms, claimed_ms,
    CAST(claimed IS NOT NULL AS int), 0, 0, 0, 0, 0, NULL,
    CASE WHEN claimed IS NOT NULL THEN 'Claimed' ELSE 'Pushed' END,
    0, NULL, NULL, part_number, "group", dedup_id, priority, body_bytes, first_pushed_ms, events,
    last_sequence
  FROM folds WHERE regular AND NOT simple
), dead_letter_queues AS (
  SELECT queue_number FROM queues WHERE queue IN (SELECT dead_letter FROM queues)
), emptied AS (
  -- The first purge or removal after the last event of a message that has no end of its own.
  SELECT message, {EMPTYING} AS emptying
  FROM folded JOIN queues ON queues.queue_number = held_in_number
  WHERE end_kind IS NULL AND ends <> []
), judged AS (
  SELECT folded.*, coalesce(last_kind = 'Departed', false) AS departed,
    CASE end_kind WHEN 'Deleted' THEN 'deleted' WHEN 'Expired' THEN 'expired'
        WHEN 'Lost' THEN 'lost' WHEN 'Arrived' THEN 'arrived'
      ELSE CASE WHEN departed THEN 'departed'
        WHEN emptying.kind = 'QueuePurged' THEN 'purged'
        WHEN emptying.kind = 'QueueRemoved' THEN 'removed'
        WHEN moved_dead OR (pushed_at_ms IS NULL AND moved_dead IS NULL
          AND held_in_number IN (SELECT queue_number FROM dead_letter_queues)) THEN 'dead'
        ELSE 'live' END END AS state,
    CASE WHEN departed THEN end_at_ms ELSE coalesce(end_at_ms, emptying.at_ms) END AS ended_at_ms
  FROM folded LEFT JOIN emptied ON emptied.message = folded.message
)
SELECT message, part_number, queue_number, held_in_number, "group", dedup_id, priority, body_bytes,
  pushed_at_ms, visible_at_ms, first_pulled_at_ms, last_pulled_at_ms, claims, extends, releases,
  timeouts, moves, dead_letters, state,
  CASE WHEN state NOT IN ('live', 'dead') THEN NULL
    WHEN last_kind IN ('Claimed', 'Extended') THEN 'in_flight'
    WHEN last_kind IN ('Pushed', 'Released') AND delayed_until_ms > 0 THEN 'delayed'
    ELSE 'visible' END AS standing,
  ended_at_ms, events, last_sequence
FROM judged
