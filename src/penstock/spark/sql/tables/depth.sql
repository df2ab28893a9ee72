-- A row for each queue and minute in which it changed. Columns: docs/formats/lake.md.
--
-- Messages without a push are from before the beginning of the journal: they count from its first
-- event. A purge counts the messages it ended by its own account; of those in a journal without
-- its beginning some are not known, so here the rows of `messages` that it ended are counted.
WITH changes AS (
  SELECT store, shard, queue AS queue_number, at_ms,
    CASE WHEN kind = 'Pushed' THEN 1 ELSE -1 END AS messages,
    0 AS in_flight, int(kind = 'Pushed') AS pushed, int(kind = 'Deleted') AS deleted
  FROM {events} WHERE {ENDED} OR kind IN ('Pushed', 'Moved')
  UNION ALL
  SELECT store, shard, held_in_number, ended_at_ms, -1, 0, 0, 0 FROM {messages}
  WHERE state IN ('purged', 'removed')
  UNION ALL
  SELECT store, shard, queue_number, first_at_ms, 1, 0, 0, 0 FROM {messages}
  JOIN (SELECT store, min(at_ms) AS first_at_ms FROM {events} WHERE kind <> 'Damaged'
    GROUP BY store) USING (store)
  WHERE pushed_at_ms IS NULL
  UNION ALL
  SELECT store, shard, to_queue, at_ms, 1, 0, 0, 0 FROM {events} WHERE kind = 'Moved'
  UNION ALL
  SELECT store, shard, queue_number, started_at_ms, 0, 1, 0, 0 FROM {attempts}
  WHERE started_at_ms IS NOT NULL
  UNION ALL
  SELECT store, shard, queue_number, ended_at_ms, 0, -1, 0, 0 FROM {attempts}
  WHERE ended_at_ms IS NOT NULL AND started_at_ms IS NOT NULL
), buckets AS (
  SELECT store, shard, queue_number, at_ms div {BUCKET_MS} AS bucket,
    sum(messages) AS messages, sum(in_flight) AS in_flight,
    sum(pushed) AS pushed, sum(deleted) AS deleted
  FROM changes GROUP BY store, shard, queue_number, at_ms div {BUCKET_MS}
)
SELECT store, shard, queue, queue_number,
  timestamp_millis(bucket * {BUCKET_MS}) AS minute,
  sum(messages) OVER line AS messages, sum(in_flight) OVER line AS in_flight, pushed, deleted
FROM buckets LEFT JOIN {queues} USING (store, shard, queue_number)
WINDOW line AS (PARTITION BY store, shard, queue_number ORDER BY bucket
  ROWS UNBOUNDED PRECEDING)
