-- A row for each queue that any event names. Columns: docs/formats/lake.md.
WITH changes AS (
  SELECT store, shard, queue AS queue_number,
    max(name) AS queue,
    coalesce(min(at_ms) FILTER (WHERE kind = 'QueueCreated'),
      min(CAST(json_extract_string(extra, '$.created_at_ms') AS bigint))) AS created_at_ms,
    max(at_ms) FILTER (WHERE kind = 'QueueRemoved') AS removed_at_ms,
    arg_max(extra, sequence) FILTER (WHERE extra IS NOT NULL) AS extra,
    max(json_extract_string(extra, '$.settings.dedup_per_group')) AS dedup_per_group,
    count_if(kind = 'QueueConfigured') AS configured,
    list({'sequence': sequence, 'at_ms': at_ms, 'kind': kind, 'before': before} ORDER BY sequence)
      FILTER (WHERE kind IN ('QueuePurged', 'QueueRemoved')) AS ends
  FROM queue_events
  WHERE kind <> 'Damaged'
  GROUP BY store, shard, queue
), known AS (
  SELECT store, shard, queue_number FROM changes
  UNION
  SELECT DISTINCT store, shard, queue_number FROM part_status
)
SELECT store, shard, queue_number,
  coalesce(queue, concat('#', queue_number)) AS queue, created_at_ms, removed_at_ms,
  CAST(json_extract_string(extra, '$.settings.fifo') AS boolean) AS fifo,
  CAST(dedup_per_group AS boolean) AS dedup_per_group,
  CAST(json_extract_string(extra, '$.settings.visibility_ms') AS bigint) AS visibility_ms,
  CAST(json_extract_string(extra, '$.settings.retention_ms') AS bigint) AS retention_ms,
  json_extract_string(extra, '$.settings.dead_letter') AS dead_letter,
  CAST(json_extract_string(extra, '$.settings.max_receives') AS bigint) AS max_receives,
  coalesce(configured, 0) AS configured,
  coalesce(ends, []) AS ends
FROM known LEFT JOIN changes USING (store, shard, queue_number)
