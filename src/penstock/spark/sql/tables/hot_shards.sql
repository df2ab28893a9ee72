-- A row for each shard and minute with events. Columns: docs/formats/lake.md.
SELECT store, shard, timestamp_millis(at_ms div {BUCKET_MS} * {BUCKET_MS}) AS minute,
  count(*) AS events, count_if(`index` = 0) AS entries, count_if(kind = 'Pushed') AS pushes,
  coalesce(sum(body_bytes), 0) AS bytes
FROM {events} WHERE kind <> 'Damaged'
GROUP BY store, shard, at_ms div {BUCKET_MS}
