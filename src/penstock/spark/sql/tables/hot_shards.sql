-- A row for each shard and minute with events. Columns: docs/formats/lake.md.
WITH busy AS (
  SELECT store, shard, minute, events, entries, pushes, bytes FROM part_minutes WHERE events > 0
  UNION ALL
  SELECT store, shard, at_ms // {BUCKET_MS}, 1, CAST(sequence % {ENTRY_SPAN} = 0 AS int), 0, 0
  FROM queue_events WHERE kind <> 'Damaged'
)
SELECT store, shard, make_timestamptz(minute * {BUCKET_MS} * 1000) AS minute,
  sum(events) AS events, sum(entries) AS entries, sum(pushes) AS pushes, sum(bytes) AS bytes
FROM busy GROUP BY store, shard, busy.minute ORDER BY store, shard, busy.minute
