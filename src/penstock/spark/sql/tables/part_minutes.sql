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
  SELECT queue AS queue_number, at_ms // {BUCKET_MS} AS minute, count(*) AS events,
    count_if("index" = 0) AS entries, coalesce(sum(body_bytes), 0) AS bytes,
    count_if(kind = 'Pushed') AS pushes, count_if(kind = 'Claimed') AS claims,
    count_if(kind = 'Deleted') AS deletes, count_if(kind = 'ClaimExpired') AS timeouts,
    count_if(kind = 'Pushed') - count_if({LEFT_QUEUE}) AS messages, 0 AS in_flight,
    count_if(kind = 'Pushed' OR {LEFT_QUEUE}) AS changes
  FROM events GROUP BY ALL
  UNION ALL
  SELECT to_queue, at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, count(*), 0, count(*)
  FROM events WHERE kind = 'Moved' GROUP BY ALL
  UNION ALL
  -- A purge counts the messages it ended by its own account; of those in a journal without its
  -- beginning some are not known, so here the rows of `messages` that it ended are counted.
  SELECT held_in_number, ended_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, -count(*), 0, count(*)
  FROM messages WHERE state IN ('purged', 'removed') GROUP BY ALL
  UNION ALL
  -- Messages without a push are from before the beginning of the journal.
  SELECT queue_number, NULL, 0, 0, 0, 0, 0, 0, 0, count(*), 0, count(*)
  FROM messages WHERE pushed_at_ms IS NULL AND state <> 'arrived' GROUP BY ALL
  UNION ALL
  SELECT queue_number, started_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, 0, count(*), count(*)
  FROM attempts WHERE started_at_ms IS NOT NULL GROUP BY ALL
  UNION ALL
  SELECT queue_number, ended_at_ms // {BUCKET_MS}, 0, 0, 0, 0, 0, 0, 0, 0, -count(*), count(*)
  FROM attempts WHERE ended_at_ms IS NOT NULL AND started_at_ms IS NOT NULL GROUP BY ALL
)
SELECT part.store, part.shard, queue_number, minute, sum(events) AS events,
  sum(entries) AS entries, sum(bytes) AS bytes, sum(pushes) AS pushes, sum(claims) AS claims,
  sum(deletes) AS deletes, sum(timeouts) AS timeouts, sum(messages) AS messages,
  sum(in_flight) AS in_flight, sum(changes) AS changes
FROM changes, part GROUP BY ALL ORDER BY minute, queue_number
