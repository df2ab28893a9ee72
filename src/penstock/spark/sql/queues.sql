-- A row for each queue that any event names. Columns: docs/formats/lake.md.
WITH known AS (
  SELECT store, shard, queue_number FROM queue_settings
  UNION
  SELECT store, shard, queue_number FROM sums
)
SELECT store, shard, queue_number, coalesce(queue, concat('#', queue_number)) AS queue,
  created_at_ms, removed_at_ms,
  CAST(get_json_object(extra, '$.settings.fifo') AS boolean) AS fifo, dedup_per_group,
  CAST(get_json_object(extra, '$.settings.visibility_ms') AS bigint) AS visibility_ms,
  CAST(get_json_object(extra, '$.settings.retention_ms') AS bigint) AS retention_ms,
  get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
  CAST(get_json_object(extra, '$.settings.max_receives') AS bigint) AS max_receives,
  coalesce(configured, 0) AS configured, coalesce(ends, array()) AS ends
FROM known LEFT JOIN queue_settings USING (store, shard, queue_number)
