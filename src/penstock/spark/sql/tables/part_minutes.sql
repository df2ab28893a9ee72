-- A row for each queue and minute: what the messages of a part add to it.
--
--   store, shard, queue_number  which queue
--   minute                      since 1970; null for what was there when the journal begins
--   events, entries, bytes      in it; entries that begin with one of these events
--   pushes, claims, deletes, timeouts
--                               of these events
--   messages, in_flight         how many more there are in the queue at its end
--   changes                     how many of these came or went
WITH changes AS (
  SELECT part_number, queue_number, minute, events, entries, bytes,
    CASE WHEN kind = 'Pushed' THEN events ELSE 0 END AS pushes,
    CASE WHEN kind = 'Claimed' THEN events ELSE 0 END AS claims,
    CASE WHEN kind = 'Deleted' THEN events ELSE 0 END AS deletes,
    CASE WHEN kind = 'ClaimExpired' THEN events ELSE 0 END AS timeouts,
    CASE WHEN kind = 'Pushed' THEN events WHEN {LEFT_QUEUE} THEN -events ELSE 0 END AS messages,
    0 AS in_flight,
    CASE WHEN kind = 'Pushed' OR {LEFT_QUEUE} THEN events ELSE 0 END AS changes
  FROM part_events
  UNION ALL
  SELECT part_number, to_queue, events.at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1
  FROM events JOIN eventful_lives USING (message) WHERE kind = 'Moved'
  UNION ALL
  -- A purge counts the messages it ended by its own account; of those in a journal without its
  -- beginning some are not known, so here the rows of `lives` that it ended are counted.
  SELECT part_number, held_in_number, ended_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, -1, 0, 1
  FROM lives WHERE state IN ('purged', 'removed')
  UNION ALL
  -- Messages without a push are from before the beginning of the journal.
  SELECT part_number, queue_number, NULL, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1
  FROM lives WHERE pushed_at_ms IS NULL AND state <> 'arrived'
  UNION ALL
  SELECT part_number, queue_number, started_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, 0, count(*),
    count(*)
  FROM claims WHERE started_at_ms IS NOT NULL GROUP BY ALL
  UNION ALL
  SELECT part_number, queue_number, ended_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, 0, -count(*),
    count(*)
  FROM claims WHERE ended_at_ms IS NOT NULL AND started_at_ms IS NOT NULL GROUP BY ALL
)
SELECT part.store, part.shard, part_number, queue_number, minute, sum(events) AS events,
  sum(entries) AS entries, sum(bytes) AS bytes, sum(pushes) AS pushes, sum(claims) AS claims,
  sum(deletes) AS deletes, sum(timeouts) AS timeouts, sum(messages) AS messages,
  sum(in_flight) AS in_flight, sum(changes) AS changes
FROM changes, part GROUP BY ALL ORDER BY minute, queue_number
