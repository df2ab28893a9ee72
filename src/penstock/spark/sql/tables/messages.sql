-- A row for each message: a fold of its events, then its queues' names, then its state. Columns:
-- docs/formats/lake.md.
--
-- A message from before the beginning of the journal has events, since its content was carried, but
-- no push. Whether it was moved before is not known: in a dead-letter queue it counts as dead.
WITH folded AS (
  SELECT store, shard, message,
    min_by(queue, sequence) AS queue_number,
    max_by(coalesce(to_queue, queue), sequence) AS held_in_number,
    max_by(coalesce(rank, message), sequence)
      FILTER (WHERE kind IN ('Pushed', 'Moved')) AS rank,
    max(`group`) AS `group`, max(dedup_id) AS dedup_id, max(priority) AS priority,
    max(body_bytes) AS body_bytes,
    min(at_ms) FILTER (WHERE kind = 'Pushed') AS pushed_at_ms,
    min_by(visible_at_ms, sequence) FILTER (WHERE kind = 'Pushed') AS visible_at_ms,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS first_pulled_at_ms,
    max(at_ms) FILTER (WHERE kind = 'Claimed') AS last_pulled_at_ms,
    count_if(kind = 'Claimed') AS claims,
    count_if(kind = 'Extended') AS extends,
    count_if(kind = 'Released') AS releases,
    count_if(kind = 'ClaimExpired') AS timeouts,
    count_if(kind = 'Moved') AS moves,
    count_if(kind = 'Moved' AND dead) AS dead_letters,
    max_by(dead, sequence) FILTER (WHERE kind = 'Moved') AS moved_dead,
    max_by(kind, sequence) FILTER (WHERE kind <> 'Carried') AS last_kind,
    max_by(visible_at_ms, sequence)
      FILTER (WHERE kind IN ('Pushed', 'Released', 'DelayEnded')) AS delayed_until_ms,
    min_by(kind, sequence) FILTER (WHERE {ENDED}) AS end_kind,
    min(at_ms) FILTER (WHERE {ENDED}) AS end_at_ms,
    count(*) AS events,
    max(sequence) AS last_sequence
  FROM {events}
  WHERE message IS NOT NULL
  GROUP BY message, shard, store
), dead_letter_queues AS (
  SELECT DISTINCT store, shard, dead_letter FROM {queues} WHERE dead_letter IS NOT NULL
), placed AS (
  SELECT folded.*, pushed_to.queue AS queue, held.queue AS held_in,
    pushed_at_ms IS NULL AND moved_dead IS NULL
      AND dead_letter_queues.dead_letter IS NOT NULL AS found_dead,
    CASE WHEN end_kind IS NULL THEN try_element_at(filter(held.ends, one ->
      one.sequence > last_sequence
      AND (one.before IS NULL OR coalesce(rank, message) < one.before)), 1) END AS swept
  FROM folded
  LEFT JOIN {queues} AS pushed_to USING (store, shard, queue_number)
  LEFT JOIN {queues} AS held
    ON held.store = folded.store AND held.shard = folded.shard
    AND held.queue_number = held_in_number
  LEFT JOIN dead_letter_queues ON dead_letter_queues.store = folded.store
    AND dead_letter_queues.shard = folded.shard AND dead_letter_queues.dead_letter = held.queue
), judged AS (
  SELECT *,
    CASE WHEN end_kind IS NOT NULL THEN lower(end_kind)
      WHEN swept.kind = 'QueuePurged' THEN 'purged'
      WHEN swept.kind = 'QueueRemoved' THEN 'removed'
      WHEN moved_dead OR found_dead THEN 'dead'
      ELSE 'live' END AS state,
    coalesce(end_at_ms, swept.at_ms) AS ended_at_ms
  FROM placed
)
SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, held_in,
  held_in_number, `group`, dedup_id, priority, body_bytes, pushed_at_ms,
  timestamp_millis(pushed_at_ms) AS pushed_at, visible_at_ms, first_pulled_at_ms,
  last_pulled_at_ms, claims, extends, releases, timeouts, moves, dead_letters, state,
  CASE WHEN state NOT IN ('live', 'dead') THEN NULL
    WHEN last_kind IN ('Claimed', 'Extended') THEN 'in_flight'
    WHEN last_kind IN ('Pushed', 'Released') AND delayed_until_ms IS NOT NULL THEN 'delayed'
    ELSE 'visible' END AS standing,
  ended_at_ms,
  first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS wait_ms,
  ended_at_ms - pushed_at_ms AS age_ms,
  events, last_sequence
FROM judged
