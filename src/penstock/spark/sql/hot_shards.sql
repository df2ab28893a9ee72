-- A row for each shard and minute with events. Columns: docs/formats/lake.md.
WITH busy AS (
  SELECT store, shard, at AS minute, events, entries, pushes, coalesce(bytes, 0) AS bytes
  FROM sums WHERE what = 'minute' AND events > 0
  UNION ALL
  SELECT store, shard, at_ms div {MINUTE_MS}, 1, CAST(sequence % {ENTRY_SPAN} = 0 AS int), 0, 0
  FROM queue_events WHERE kind <> 'Damaged'
)
SELECT store, shard, timestamp_millis(busy.minute * {MINUTE_MS}) AS minute, sum(events) AS events,
  sum(entries) AS entries, sum(pushes) AS pushes, sum(bytes) AS bytes
FROM busy GROUP BY store, shard, busy.minute
