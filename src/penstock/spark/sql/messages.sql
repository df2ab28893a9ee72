-- A row for each message of the parts that are made: a fold of its events in one aggregate, then what
-- follows from it. Columns: docs/formats/lake.md.
--
-- A purge or a removal ends messages without naming them. A queue has few of those, so they are one
-- array in its row of `known_queues` (`ends`), and a message's end is the first of them after its last event.
--
-- A message from before the beginning of the journal has events, since its content was carried, but
-- no push. Whether it was moved before is not known: in a dead-letter queue it counts as dead.
WITH folded AS (
  SELECT slot, part, key, count(*) AS events, max(sequence) AS last_sequence,
    min_by(queue, sequence) AS queue_number,
    max_by(coalesce(to_queue, queue), sequence) AS held_in_number,
    max_by(coalesce(rank, {MESSAGE}), if(code IN ({Pushed}, {Moved}), sequence, NULL)) AS rank,
    min(queue) = max(queue) AND min(term) = max(term) AS same_place, min(term) AS term,
    max(`group`) AS `group`, max(dedup_id) AS dedup_id, max(priority) AS priority,
    max(body_bytes) AS body_bytes,
    max(if(code = {Claimed}, holder, NULL)) AS holder,
    max(if(code = {Claimed}, attempt_id, NULL)) AS attempt_id,
    max(if(code = {Pushed} AND visible_at_ms IS NULL, sequence, NULL)) AS pushed,
    max(if(code = {Claimed} AND epoch = 1, sequence, NULL)) AS claimed,
    max(if(code = {Deleted} AND epoch = 1, sequence, NULL)) AS deleted,
    min(if(code = {Pushed}, at_ms, NULL)) AS pushed_at_ms,
    min_by(visible_at_ms, if(code = {Pushed} AND visible_at_ms IS NOT NULL, sequence, NULL))
      AS visible_at_ms,
    max(if(code = {Pushed}, expires_at_ms, NULL)) AS expires_at_ms,
    min(if(code = {Claimed}, at_ms, NULL)) AS first_pulled_at_ms,
    max(if(code = {Claimed}, at_ms, NULL)) AS last_pulled_at_ms,
    max(if(code = {Claimed} AND epoch = 1, deadline_ms, NULL)) AS deadline_ms,
    count_if(code = {Claimed}) AS claims, count_if(code = {Extended}) AS extends,
    count_if(code = {Released}) AS releases, count_if(code = {ClaimExpired}) AS timeouts,
    count_if(code = {Moved}) AS moves,
    count_if(code = {Departed} OR (code = {Moved} AND dead)) AS dead_letters,
    max_by(CAST(dead AS int), if(code = {Moved}, sequence, NULL)) = 1 AS moved_dead,
    max_by(CAST(code AS int), if(code <> {Carried}, sequence, NULL)) AS last_code,
    max_by(coalesce(visible_at_ms, 0),
      if(code IN ({Pushed}, {Released}, {DelayEnded}), sequence, NULL)) AS delayed_until_ms,
    min_by(CAST(code AS int), if({ENDED}, sequence, NULL)) AS end_code,
    min(if({ENDED}, at_ms, NULL)) AS end_at_ms
  FROM part_events GROUP BY slot, part, key
), lives AS (
  SELECT folded.*, {MESSAGE} AS message, held.queue AS held_in, held.is_dead_letter,
    -- Pushed without delay, perhaps claimed once, perhaps deleted by that claim, in one queue and
    -- term, and nothing else: each of the three is there at most once, and no other event is.
    coalesce(events = 1 + CAST(claimed IS NOT NULL AS int) + CAST(deleted IS NOT NULL AS int)
      AND (claimed IS NULL OR claimed > pushed) AND (deleted IS NULL OR deleted > claimed)
      AND pushed IS NOT NULL AND same_place, false) AS regular,
    -- A purge leaves messages that came while it was made.
    if(end_code IS NULL AND size(held.ends) > 0,
      get(filter(held.ends, one -> one.sequence > last_sequence
        AND (one.before IS NULL OR coalesce(rank, {MESSAGE}) < one.before)), 0), NULL) AS emptying
  FROM folded LEFT JOIN known_queues AS held
    ON held.queue_key = shiftright(key, {MESSAGE_BITS}) * {QUEUES} + held_in_number
), judged AS (
  SELECT *, CASE end_code WHEN {Deleted} THEN 'deleted' WHEN {Expired} THEN 'expired'
      WHEN {Lost} THEN 'lost' WHEN {Arrived} THEN 'arrived'
      ELSE CASE WHEN last_code = {Departed} THEN 'departed'
        WHEN emptying.kind = 'QueuePurged' THEN 'purged'
        WHEN emptying.kind = 'QueueRemoved' THEN 'removed'
        WHEN moved_dead OR (pushed_at_ms IS NULL AND moved_dead IS NULL AND is_dead_letter)
          THEN 'dead'
        ELSE 'live' END END AS state,
    if(last_code = {Departed}, end_at_ms, coalesce(end_at_ms, emptying.at_ms)) AS ended_at_ms
  FROM lives
)
SELECT store, shard, message,
  concat(prefix, lpad(lower(hex(message)), 12, '0')) AS message_id,
  coalesce(came.queue, concat('#', judged.queue_number)) AS queue, judged.queue_number,
  coalesce(held_in, concat('#', held_in_number)) AS held_in, held_in_number, `group`, dedup_id,
  priority, body_bytes, pushed_at_ms, timestamp_millis(pushed_at_ms) AS pushed_at, visible_at_ms,
  first_pulled_at_ms, last_pulled_at_ms, claims, extends, releases, timeouts, moves, dead_letters,
  state,
  CASE WHEN state NOT IN ('live', 'dead') THEN NULL
    WHEN last_code IN ({Claimed}, {Extended}) THEN 'in_flight'
    WHEN last_code IN ({Pushed}, {Released}) AND delayed_until_ms > 0 THEN 'delayed'
    ELSE 'visible' END AS standing,
  ended_at_ms, first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS wait_ms,
  ended_at_ms - pushed_at_ms AS age_ms, events, last_sequence, false AS dropped, key, regular, term,
  pushed, claimed, deleted, expires_at_ms, deadline_ms, holder, attempt_id, part
FROM judged JOIN journals ON journals.journal = shiftright(key, {MESSAGE_BITS})
LEFT JOIN known_queues AS came
  ON came.queue_key = shiftright(key, {MESSAGE_BITS}) * {QUEUES} + judged.queue_number
